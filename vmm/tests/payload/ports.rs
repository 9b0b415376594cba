//! Ports of the console device.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use husk_proto::vmm::v1::{self as pb};

use super::guest::{elf, halt, print};
use super::rig::Rig;

impl Rig {
    /// A port, and the monitor's end of it.
    async fn port(&self, name: &str) -> (pb::Port, UnixStream) {
        let (outside, inside) = UnixStream::pair().unwrap();
        outside.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let port = pb::Port {
            name: name.into(),
            stream: Some(self.send(inside).await),
        };
        (port, outside)
    }
}

#[tokio::test]
async fn the_vmm_holds_its_ends_until_it_ends() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&[print("up"), halt()].concat(), false)).await;
    let (mut ports, mut ends) = (Vec::new(), Vec::new());
    for name in ["first", "second"] {
        let (port, outside) = rig.port(name).await;
        ports.push(port);
        ends.push(outside);
    }
    config.ports = ports;
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    rig.client.pause(pb::PauseRequest::default()).await.unwrap();
    rig.client.resume(pb::ResumeRequest::default()).await.unwrap();
    rig.client.reset(pb::ResetRequest {}).await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    for end in &mut ends {
        end.set_nonblocking(true).unwrap();
        let error = end.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        end.set_nonblocking(false).unwrap();
    }
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
    for end in &mut ends {
        assert_eq!(end.read(&mut [0]).unwrap(), 0);
    }
}

#[tokio::test]
async fn unsuitable_ports_are_refused_with_the_reason() {
    for (names, reason) in [
        (&["a", "b", "a"][..], "two ports \"a\""),
        (&["a", ""], "config.ports[1].name is missing"),
        (&["1", "2", "3", "4", "5", "6", "7", "8", "9"], "1 to 8 ports"),
    ] {
        let mut rig = Rig::start().await;
        let mut config = rig.config(&elf(&halt(), false)).await;
        for name in names {
            config.ports.push(rig.port(name).await.0);
        }
        let error = rig.create(config).await.unwrap_err();
        assert!(error.message().contains(reason), "{error}");
    }
}
