//! The process of a pod: serves until containerd says that nothing of the pod is left.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::shim_async::create_task;
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::asynchronous::transport::Listener;
use husk_shim::cgroup;
use tracing::{error, info};

use crate::bootstrap::{Flags, LISTENER_FD, TTRPC_ADDRESS};
use crate::logging;
use crate::pod::{Pod, PodHandle};
use crate::publisher::Publisher;
use crate::task::Service;

const TASK_V3: &str = "containerd.task.v3.Task";
/// The same service under the name that containerd 1.7 knows.
const TASK_V2: &str = "containerd.task.v2.Task";
/// How long containerd has to read the answer to its last call.
const FAREWELL: Duration = Duration::from_millis(200);

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
        // A volume may still be opened for a VM that was ended meanwhile.
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
    let listener = listener()?;
    let socket = listener.local_addr()?.as_pathname().map(ToOwned::to_owned);
    // The bundle goes before this process does.
    std::env::set_current_dir("/")?;
    let address = std::env::var(TTRPC_ADDRESS).map_err(io::Error::other)?;
    let publisher = Publisher::new(address, flags.namespace.clone());
    let (pod, handle) = Pod::new(publisher, cgroup::own().ok());
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
    let publisher = pod.live().await;
    // Nobody finds it any more.
    if let Some(socket) = socket {
        let _ = std::fs::remove_file(socket);
    }
    server.stop_listen().await;
    publisher.flush().await;
    tokio::time::sleep(FAREWELL).await;
    info!("the shim ends");
    Ok(())
}

/// The socket that `start` left.
fn listener() -> io::Result<UnixListener> {
    // What is at that number if nobody left a socket there is not this process's to close.
    if !std::fs::read_link(format!("/proc/self/fd/{LISTENER_FD}"))
        .is_ok_and(|what| what.to_string_lossy().starts_with("socket:"))
    {
        return Err(io::Error::other(
            "no socket was inherited: this program is started by containerd",
        ));
    }
    // SAFETY: descriptor 3 is a socket that was inherited, and nothing in this process owns it yet: no file was opened
    // before that could have its number, because it was in use at exec.
    let fd = unsafe { OwnedFd::from_raw_fd(LISTENER_FD) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    let listener = UnixListener::from(fd);
    listener.set_nonblocking(true)?;
    Ok(listener)
}
