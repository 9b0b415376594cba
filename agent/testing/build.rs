//! Compiles the kubelet's API without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../proto");
    let set = protox::compile(["../proto/deviceplugin.proto"], ["../proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(set)?;
    Ok(())
}
