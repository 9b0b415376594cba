//! Objects of a manifest.
