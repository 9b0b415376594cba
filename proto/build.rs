//! Compiles the .proto files without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["proto/husk/vmm/v1/vmm.proto", "proto/husk/shim/v1/shim.proto"];
    let set = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(set)?;
    Ok(())
}
