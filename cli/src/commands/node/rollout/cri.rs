//! A call of the Container Runtime Interface: containerd is up when its CRI plugin answers the kubelet.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::failure::{self, Failure};
use crate::live_vm::block_on;

/// Maximum time of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two attempts.
const INTERVAL: Duration = Duration::from_millis(250);
/// The call. Request and answer are read as empty messages.
const VERSION: &str = "/runtime.v1.RuntimeService/Version";

/// The process that listens on containerd's socket.
pub(super) fn listener(socket: &Path) -> Result<i32, String> {
    let found = block_on(async {
        let stream = UnixStream::connect(socket).await?;
        Ok(stream.peer_cred()?.pid())
    });
    match found {
        Ok(Some(pid)) if pid > 0 => Ok(pid),
        Ok(_) => Err("its process is not visible: run in the PID namespace of the node (hostPID)".to_owned()),
        Err(Failure::Runtime(why)) => Err(why),
        Err(_) => Err("it does not answer".to_owned()),
    }
}

/// Waits until containerd answers, in another process than `former`. Returns the last error after `limit`.
pub(super) fn wait(socket: &Path, former: Option<i32>, limit: Duration) -> Result<(), String> {
    let deadline = std::time::Instant::now() + limit;
    loop {
        let tried = match listener(socket) {
            Ok(pid) if Some(pid) == former => Err("its process was not restarted".to_owned()),
            Ok(_) => answer(socket.to_owned(), deadline),
            Err(why) => Err(why),
        };
        match tried {
            Ok(()) => return Ok(()),
            Err(why) if std::time::Instant::now() >= deadline => return Err(why),
            Err(_) => std::thread::sleep(INTERVAL),
        }
    }
}

/// Calls until there is an answer or the deadline has passed.
fn answer(socket: PathBuf, deadline: std::time::Instant) -> Result<(), String> {
    let done = block_on(async move {
        let deadline = Instant::from_std(deadline);
        loop {
            let error = match timeout(CALL_TIMEOUT, call(&socket)).await {
                Ok(Ok(())) => return Ok(Ok(())),
                Ok(Err(error)) => error,
                Err(_) => format!("no answer within {} s", CALL_TIMEOUT.as_secs()),
            };
            if Instant::now() >= deadline {
                return Ok(Err(error));
            }
            sleep(INTERVAL).await;
        }
    });
    done.unwrap_or_else(|_| Err("no runtime for the call".to_owned()))
}

async fn call(socket: &Path) -> Result<(), String> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://containerd")
        .connect_with_connector(connector)
        .await
        .map_err(|error| failure::chain(&error))?;
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| failure::chain(&error))?;
    let codec = ProstCodec::<(), ()>::default();
    let called = client.unary(tonic::Request::new(()), PathAndQuery::from_static(VERSION), codec);
    match called.await {
        Ok(_) => Ok(()),
        Err(status) if status.code() == tonic::Code::Unimplemented => {
            Err("its CRI plugin does not run".to_owned())
        }
        Err(status) => Err(failure::one_line(status.message())),
    }
}
