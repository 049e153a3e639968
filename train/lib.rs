//! kumiki's training: corpora, batches, trainer, logs, experiments.
