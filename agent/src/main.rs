//! `husk-agent`: the agent of a node, in the place of KubeVirt's virt-handler.
//!
//! ```text
//! kubelet ◀── device_plugin: devices.kubevirt.io/{kvm,tun,vhost-net,vhost-vsock} ── registered ──▶ node: heartbeat, labels ──▶ API server
//! shim ◀── pod.sock ── vmi: an actor per VMI ◀── watch, status ──▶ API server
//!   ▲── pod.sock ── rest: console, pause, reset ◀── HTTP over mutual TLS ── virt-api
//!   ▲── pod.sock ── monitoring: health, metrics ◀── HTTP over TLS ── kubelet, Prometheus
//! ```

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use husk_agent::api_client;
use husk_agent::device_plugin::{DevicePlugin, node_devices};
use husk_agent::event::EventSender;
use husk_agent::monitoring::{self, Readiness};
use husk_agent::node::{LauncherPods, NodeActor, NodeShim, ShimUsers, follow_configuration};
use husk_agent::rest::{self, VsockCertificateDir};
use husk_agent::service::{self, CertificateFiles, TlsOptions};
use husk_agent::vmi::{PodsDir, RuntimeDir, VmiController};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

/// Root directory of the node. The agent is in the node's PID namespace.
const NODE_ROOT: &str = "/proc/1/root";

/// The agent of a node whose KubeVirt VMs run on Husk, in the place of virt-handler
///
/// Publishes the node's devices to the kubelet, keeps KubeVirt's heartbeat and labels of the Node, and runs the VMIs whose
/// launcher pods run under Husk. It connects to the API server by the service account of its pod, or by KUBECONFIG.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
SIGTERM and SIGINT end it: the node is then not schedulable for VMIs."
)]
struct Args {
    /// Name of the node
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: String,

    /// The kubelet's directory of device plugins
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    device_plugin_dir: PathBuf,

    /// The kubelet's directory of pods, in which attachment pods have hotplugged volumes
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/pods")]
    pods_dir: PathBuf,

    /// The kubelet's directory of pods' logs, which shows the namespace of each attachment pod
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pod_logs_dir: PathBuf,

    /// Husk's runtime directory
    #[arg(long, value_name = "DIR", default_value = "/run/husk")]
    runtime_dir: PathBuf,

    /// The program husk, which removes the shim from a node that leaves (label husk.io/node=leaving)
    #[arg(long, value_name = "FILE", default_value = "/husk")]
    husk: PathBuf,

    /// Directory of the node in which `husk node install --restart` has installed the shim
    #[arg(long, value_name = "DIR", default_value = "/opt/husk")]
    versions_dir: PathBuf,

    /// Address of the service for virt-api: console, pause and others. `[::]` is that of IPv4 too
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8186")]
    rest_address: SocketAddr,

    /// Address of the service for the kubelet's probes and for Prometheus: /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8443")]
    metrics_address: SocketAddr,

    /// Directory of the services' certificate and key, tls.crt and tls.key, as virt-operator makes them for virt-handler
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/etc/virt-handler/servercertificates"
    )]
    certificate_dir: PathBuf,

    /// Directory of the client certificate that a guest's TLS server is shown by a connection through the subresource vsock,
    /// tls.crt and tls.key, as virt-operator makes them for virt-handler
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/etc/virt-handler/vsockclientcertificates"
    )]
    vsock_certificate_dir: PathBuf,

    /// Namespace of KubeVirt, which has its CAs
    #[arg(
        long,
        env = "KUBEVIRT_NAMESPACE",
        value_name = "NAME",
        default_value = "kubevirt"
    )]
    kubevirt_namespace: String,

    /// Number of VMIs that the node can run at the same time
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_devices: u32,

    /// Write logs as JSON
    #[arg(long)]
    log_json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    match args.log_json {
        true => log.json().init(),
        false => log.init(),
    }
    // Consoles, vsock streams and shims take descriptors. Without more the agent works for fewer of them.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    let _ = setrlimit(Resource::Nofile, files);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ran = match runtime {
        Ok(runtime) => {
            let ran = runtime.block_on(run(args));
            // A volume that hangs may block a thread for ever.
            runtime.shutdown_background();
            ran
        }
        Err(error) => Err(format!("the asynchronous runtime: {error}")),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    let client = api_client::connect().await?;
    let (stop, stopped) = watch::channel(false);
    let mut plugins = Vec::new();
    let mut tasks = tokio::task::JoinSet::new();
    for device in node_devices() {
        let name = device.name;
        let (plugin, registered) =
            DevicePlugin::new(device, args.max_devices, args.device_plugin_dir.clone());
        plugins.push((name, registered));
        tasks.spawn(plugin.run(stopped.clone()));
    }
    let events = EventSender::new(client.clone(), args.node_name.clone());
    let runtime = RuntimeDir::at(args.runtime_dir);
    let launchers = LauncherPods::at(args.pods_dir.clone(), args.pod_logs_dir.clone());
    let pods = PodsDir::at(args.pods_dir, args.pod_logs_dir, NODE_ROOT.into());
    let (vmis, finder, foreign) = VmiController::new(
        args.node_name.clone(),
        runtime,
        pods,
        client.clone(),
        events.clone(),
    );
    let present = vmis.present();
    tasks.spawn(vmis.run(stopped.clone()));
    let listener = bind(args.rest_address)?;
    let monitoring_listener = bind(args.metrics_address)?;
    let (rest_settings, rest_tls) = watch::channel(None);
    let (monitoring_settings, monitoring_tls) = watch::channel(None);
    let (tls_options, followed_options) = watch::channel(TlsOptions::default());
    tasks.spawn(follow_configuration(
        client.clone(),
        TlsOptions::of,
        tls_options,
        stopped.clone(),
    ));
    let files = CertificateFiles::new(args.certificate_dir);
    tasks.spawn(files.follow(
        client.clone(),
        args.kubevirt_namespace,
        followed_options,
        rest_settings,
        monitoring_settings,
        stopped.clone(),
    ));
    let readiness = Readiness {
        vmis: finder.listed(),
        rest: rest_tls.clone(),
        plugins: plugins.clone(),
    };
    tasks.spawn(monitoring::serve(
        monitoring_listener,
        monitoring_tls,
        args.node_name.clone(),
        client.clone(),
        finder.clone(),
        readiness,
        stopped.clone(),
    ));
    tasks.spawn(rest::serve(
        listener,
        rest_tls,
        finder,
        events.clone(),
        VsockCertificateDir(args.vsock_certificate_dir),
        stopped.clone(),
    ));
    let shim = NodeShim::new(args.husk, NODE_ROOT.into(), args.versions_dir);
    let node = NodeActor::new(
        args.node_name.clone(),
        client,
        events,
        plugins,
        foreign,
        ShimUsers {
            vmis: present,
            launchers,
        },
        shim,
    );
    tasks.spawn(node.run(stopped));
    info!(
        node = args.node_name,
        version = env!("CARGO_PKG_VERSION"),
        "the agent runs"
    );
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        // A task ends before its time only if it panics.
        _ = tasks.join_next() => return Err("a part of the agent failed".to_owned()),
    }
    info!("the agent ends");
    stop.send_replace(true);
    while tasks.join_next().await.is_some() {}
    Ok(())
}

fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    service::listen(address).map_err(|error| format!("{address}: {error}"))
}
