//! Delivery of a VMM's last event to a monitor that is slow to read.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use husk_proto::fds;
use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{EventsRequest, StopRequest};
use hyper_util::rt::TokioIo;
use tonic::transport::Endpoint;

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

#[test]
fn a_slow_monitor_receives_the_last_event() {
    let (control, theirs) = UnixStream::pair().unwrap();
    let (_fd_channel, fds_theirs) = fds::socketpair().unwrap();
    // The connection ends with the runtime, as with the process.
    let vmm = std::thread::spawn(move || {
        runtime()
            .block_on(husk_vmm::control::run(theirs.into(), fds_theirs, None))
            .unwrap()
    });
    runtime().block_on(async {
        control.set_nonblocking(true).unwrap();
        let stream = Mutex::new(Some(tokio::net::UnixStream::from_std(control).unwrap()));
        let connector = tower::service_fn(move |_| {
            let stream = stream.lock().unwrap().take();
            async move {
                stream
                    .map(TokioIo::new)
                    .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected))
            }
        });
        // Less than an event: the VMM can send the rest of it when the monitor has read the first part.
        let endpoint = Endpoint::from_static("http://vmm").initial_stream_window_size(8);
        let mut client = VmmClient::new(endpoint.connect_with_connector(connector).await.unwrap());
        let mut events = client.events(EventsRequest {}).await.unwrap().into_inner();
        client.stop(StopRequest {}).await.unwrap();
        std::thread::sleep(Duration::from_millis(600));
        let mut last = None;
        while let Some(event) = events.message().await.unwrap() {
            last = event.event;
        }
        assert!(matches!(last, Some(Kind::Exit(_))), "{last:?}");
    });
    vmm.join().unwrap();
}
