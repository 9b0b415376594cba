//! `husk-flow` in a namespace: the guest's peer, which checks every byte.

use super::TIMEOUT;
use super::context::{TestContext, program};
use super::netns::Netns;
use super::program::Session;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Default port of its servers.
pub const PORT: u16 = 7000;

/// Path of the program, which guests use too.
pub fn binary() -> PathBuf {
    program("husk-flow")
}

/// A server in `netns`, for both families, until it is dropped.
pub fn serve(ctx: &TestContext, netns: &Netns, port: u16) -> Result<Session> {
    let mut command = netns.command(binary());
    command.args(["serve", &format!("[::]:{port}")]);
    let session = Session::piped(command, &ctx.log(&format!("flow.{port}.log")))?;
    session.expect("flow: listening", TIMEOUT)?;
    Ok(session)
}

/// Moves bytes between `netns` and a server: `words` are, for example, `both 10.0.0.1:7000 1000`.
pub fn request(ctx: &TestContext, netns: &Netns, words: &str, limit: Duration) -> Result<String> {
    let mut command = netns.command(binary());
    command.args(words.split_whitespace());
    ctx.finish(command, limit)?
        .ok()
        .with_context(|| format!("husk-flow {words}"))
}

/// Starts such a transfer.
pub fn begin(ctx: &TestContext, netns: &Netns, words: &str) -> Result<Session> {
    let mut command = netns.command(binary());
    command.args(words.split_whitespace());
    Session::piped(command, &ctx.log("flow.log"))
}
