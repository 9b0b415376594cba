//! The shim process of a pod, which serves until containerd shuts it down.

use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::shim_async::create_task;
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::asynchronous::transport::Listener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info};

use crate::bootstrap::{Address, Flags, LISTENING, TTRPC_ADDRESS};
use crate::logging;
use crate::pod::{Pod, PodHandle};
use crate::publisher::Publisher;
use crate::task::Service;

const TASK_V3: &str = "containerd.task.v3.Task";
/// The name of the same service in containerd 1.7.
const TASK_V2: &str = "containerd.task.v2.Task";
/// Time for containerd to read the answer to its last call.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

pub(crate) fn serve(flags: Flags) -> ExitCode {
    let Ok(bundle) = std::env::current_dir() else {
        return ExitCode::FAILURE;
    };
    logging::begin(&bundle, flags.debug);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_millis(100))
        .build();
    let served = runtime.and_then(|runtime| {
        let served = runtime.block_on(run(flags));
        // A blocking task may still open a volume of a VM that has ended.
        runtime.shutdown_background();
        served
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(%error, "the shim failed");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: Flags) -> io::Result<()> {
    // A closed terminal must not end a VM.
    let _ignored = signal(SignalKind::hangup())?;
    let socket = Address::at(&flags.socket);
    let listener = match socket.listen() {
        Ok(listener) => listener,
        Err(why) => {
            report(&why);
            return Err(io::Error::other(why));
        }
    };
    report(LISTENING);
    // Another shim may have started for the same pod.
    let Some(listener) = listener else {
        return Ok(());
    };
    listener.set_nonblocking(true)?;
    // The bundle is removed before this process exits.
    std::env::set_current_dir("/")?;
    let address = std::env::var(TTRPC_ADDRESS).map_err(io::Error::other)?;
    let publisher = Publisher::new(address, flags.namespace.clone());
    let (pod, handle) = Pod::new(publisher, husk_cgroup::current().ok());
    let mut server = Server::new().add_listener(Listener::try_from(listener)?);
    for name in [TASK_V2, TASK_V3] {
        let service = create_task(Arc::new(Service::new(handle.clone())));
        let renamed = service
            .into_iter()
            .map(|(known, service)| (if known == TASK_V3 { name.to_owned() } else { known }, service));
        server = server.register_service(renamed.collect());
    }
    drop::<PodHandle>(handle);
    server.start().await.map_err(io::Error::other)?;
    info!(id = flags.id, namespace = flags.namespace, "the shim serves");
    let publisher = pod.run().await;
    // No new connections.
    socket.remove();
    server.stop_listen().await;
    publisher.flush().await;
    tokio::time::sleep(LAST_ANSWER_TIMEOUT).await;
    info!("the shim ends");
    Ok(())
}

/// Reports to `start`, which reads standard output to its end.
fn report(what: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(what.as_bytes()).and_then(|()| stdout.flush());
    if let Ok(null) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}
