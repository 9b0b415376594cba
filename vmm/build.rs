//! How the program is linked.

fn main() {
    // A position-independent program has ten thousand addresses to relocate: 3 KiB of them instead of 260.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo::rerun-if-changed=build.rs");
}
