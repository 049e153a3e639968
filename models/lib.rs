//! kumiki's models: each paper architecture as one plain struct.
