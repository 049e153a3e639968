//! kumiki's tape: variables, parameters, the reverse walker, gradcheck.
