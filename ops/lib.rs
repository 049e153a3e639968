//! kumiki's operators: one file each, forward and backward.
