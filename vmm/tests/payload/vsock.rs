//! The vsock device of a guest without a driver. The device itself is tested in its crate.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use husk_proto::vmm::v1::{self as pb};
use tonic::Code;

use super::guest::{elf, halt, print};
use super::rig::Rig;

/// A socket for the VMM, and its other end.
async fn stream(rig: &Rig) -> (Option<pb::Fd>, UnixStream) {
    let (outside, inside) = UnixStream::pair().unwrap();
    outside.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (Some(rig.send(inside).await), outside)
}

#[tokio::test]
async fn a_guest_without_a_driver_is_not_connected() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&[print("up"), halt()].concat(), false)).await;
    config.vsock_cid = 3;
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    for round in 0..2 {
        let (fd, mut outside) = stream(&rig).await;
        let request = pb::ConnectVsockRequest { port: 22, stream: fd };
        let error = rig.client.connect_vsock(request).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("has no vsock driver"), "{error}");
        assert_eq!(outside.read(&mut [0]).unwrap(), 0);
        let (fd, mut outside) = stream(&rig).await;
        let answer = pb::AnswerVsockRequest { id: 5, stream: fd };
        rig.client.answer_vsock(answer).await.unwrap();
        assert_eq!(outside.read(&mut [0]).unwrap(), 0);
        if round == 0 {
            rig.client.pause(pb::PauseRequest::default()).await.unwrap();
            rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
            rig.client.reset(pb::ResetRequest {}).await.unwrap();
            assert_eq!(rig.read_console(2).await, "up");
        }
    }
    let mut requests = rig
        .client
        .vsock_requests(pb::VsockRequestsRequest {})
        .await
        .unwrap()
        .into_inner();
    let again = rig
        .client
        .vsock_requests(pb::VsockRequestsRequest {})
        .await
        .unwrap_err();
    assert_eq!(again.code(), Code::FailedPrecondition);
    // The stream ends with the VM.
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert!(requests.message().await.is_ok_and(|request| request.is_none()));
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn bad_configurations_and_calls_are_refused() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&halt(), false)).await;
    config.vsock_cid = 2;
    let error = rig.create(config).await.unwrap_err();
    assert!(
        error
            .message()
            .starts_with("config.vsock_cid: must be at least 3"),
        "{error}"
    );

    for (cid, text) in [(0, "config.vhost_vsock: needs config.vsock_cid"), (3, "vsock: ")] {
        let mut rig = Rig::start().await;
        let mut config = rig.config(&elf(&halt(), false)).await;
        config.vsock_cid = cid;
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .unwrap();
        config.vhost_vsock = Some(rig.send(file).await);
        let error = rig.create(config).await.unwrap_err();
        assert!(error.message().starts_with(text), "{error}");
    }

    let mut rig = Rig::start().await;
    rig.run(&elf(&[print("up"), halt()].concat(), false)).await;
    let error = rig
        .client
        .connect_vsock(pb::ConnectVsockRequest {
            port: 1,
            stream: None,
        })
        .await;
    assert_eq!(error.unwrap_err().message(), "stream is missing");
    let (fd, _outside) = stream(&rig).await;
    let error = rig
        .client
        .connect_vsock(pb::ConnectVsockRequest { port: 1, stream: fd })
        .await;
    assert_eq!(
        error.unwrap_err().message(),
        "the VMM carries no vsock connections of the VM"
    );
}
