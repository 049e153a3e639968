//! kumiki's layers, initialisation, optimisers and schedules.
