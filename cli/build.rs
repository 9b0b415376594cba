//! How the programs are linked.

fn main() {
    // A position-independent program has addresses to relocate: 12 KiB of them instead of 950.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo::rerun-if-changed=build.rs");
}
