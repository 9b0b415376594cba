//! `husk-played-nodes`: nodes of a real cluster, whose kubelets, containerds and shims are played. The agents are real.
//!
//! ```text
//! API server ◀── Node, Lease, status of pods ── Kubelet ── starts the DaemonSet's program ──▶ husk-agent (a process)
//!                                                  └─ Shim per launcher pod ◀── pod.sock ──────┘
//! ```

mod node;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use node::Kubelet;

/// Plays nodes of the cluster of KUBECONFIG, and runs husk-agent for each
///
/// The account needs all rights. Nodes and pods stay when it ends; agents do not.
#[derive(Debug, Parser)]
struct Args {
    /// Number of nodes, which are called played-1 and so on
    #[arg(long, value_name = "N")]
    nodes: u32,

    /// The program husk-agent
    #[arg(long, value_name = "FILE")]
    agent: PathBuf,

    /// An empty directory with a short path, which becomes DIR/NODE/agent.pid and more
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ran = runtime
        .context("the asynchronous runtime")
        .and_then(|runtime| runtime.block_on(run(args)));
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let client = Client::try_default().await.context("the API server")?;
    let mut kubelets = HashMap::new();
    for number in 1..=args.nodes {
        let kubelet = Kubelet::new(number, client.clone(), &args.dir, args.agent.clone())?;
        kubelet.register().await?;
        tokio::spawn(kubelet.clone().keep_lease());
        kubelets.insert(kubelet.name(), kubelet);
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        // The agents are killed with their tasks.
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        ended = follow_pods(client, &kubelets) => ended,
    }
}

/// Runs a task for each pod of the nodes.
async fn follow_pods(client: Client, kubelets: &HashMap<String, Kubelet>) -> Result<()> {
    let mut pods: HashMap<String, watch::Sender<Pod>> = HashMap::new();
    let stream = watcher(Api::<Pod>::all(client), watcher::Config::default()).default_backoff();
    let mut stream = std::pin::pin!(stream);
    loop {
        let event = match stream.try_next().await {
            Ok(event) => event.context("the watch of pods has ended")?,
            Err(error) => {
                tracing::warn!(%error, "the watch of pods");
                continue;
            }
        };
        match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
                let Some(kubelet) = node.and_then(|node| kubelets.get(node)) else {
                    continue;
                };
                if let Some(known) = pods.get(&uid) {
                    known.send_replace(pod);
                    continue;
                }
                let (sender, pod) = watch::channel(pod);
                pods.insert(uid, sender);
                tokio::spawn(kubelet.clone().run_pod(pod));
            }
            watcher::Event::Delete(pod) => {
                pods.remove(pod.metadata.uid.as_deref().unwrap_or_default());
            }
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
    }
}
