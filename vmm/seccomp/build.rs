//! Compiles the tables to BPF programs at build time.

use std::error::Error;
use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

#[path = "src/compile.rs"]
mod compile;
#[path = "src/role.rs"]
mod role;
#[path = "src/shorten.rs"]
mod shorten;
#[path = "src/tables.rs"]
mod tables;

use role::ThreadRole;

fn main() -> Result<(), Box<dyn Error>> {
    if env::var("CARGO_CFG_TARGET_ARCH")? != "x86_64" {
        return Err("the tables are those of x86-64".into());
    }
    let mut text =
        String::from("fn program(role: ThreadRole) -> &'static [sock_filter] {\n    match role {\n");
    for role in ThreadRole::ALL {
        writeln!(text, "        ThreadRole::{role:?} => &[")?;
        for one in shorten::shorten(compile::program(role)?) {
            let (code, jt, jf, k) = (one.code, one.jt, one.jf, one.k);
            writeln!(
                text,
                "            sock_filter {{ code: {code}, jt: {jt}, jf: {jf}, k: {k} }},"
            )?;
        }
        writeln!(text, "        ],")?;
    }
    text.push_str("    }\n}\n");
    writeln!(text, "const OWN_PROCESS: u32 = {};", tables::OWN_PROCESS)?;
    fs::write(Path::new(&env::var("OUT_DIR")?).join("programs.rs"), text)?;
    for file in [
        "build.rs",
        "src/compile.rs",
        "src/role.rs",
        "src/shorten.rs",
        "src/tables.rs",
    ] {
        println!("cargo::rerun-if-changed={file}");
    }
    Ok(())
}
