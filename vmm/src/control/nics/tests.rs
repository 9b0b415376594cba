use std::fs::File;
use std::os::fd::AsFd;

use husk_proto::fds::{self, FdSender};

use super::*;

fn nic(fd: &pb::Fd) -> pb::Nic {
    pb::Nic {
        id: "default".into(),
        mac: vec![2, 0, 0, 0, 0, 1],
        taps: vec![fd.clone()],
        ..Default::default()
    }
}

#[tokio::test]
async fn a_nic_has_the_properties_of_its_request() {
    let (sender, receiver) = fds::socketpair().unwrap();
    let (sender, fds) = (FdSender::new(sender).unwrap(), FdReceiver::new(receiver).unwrap());
    let null = File::open("/dev/null").unwrap();
    let mut tokens = Vec::new();
    for _ in 0..4 {
        tokens.push(pb::Fd::from(sender.send_one(null.as_fd()).await.unwrap()));
    }
    let described = pb::Nic {
        mtu: 9000,
        taps: tokens[..2].to_vec(),
        vhost: tokens[2..].to_vec(),
        link_down: true,
        ..nic(&tokens[0])
    };
    let setup = setup(&fds, "nic", &described).await.unwrap();
    assert_eq!(
        (&setup.id[..], setup.mac[5], setup.mtu, setup.link),
        ("default", 1, Some(9000), false)
    );
    assert!(setup.pairs.len() == 2 && setup.pairs.iter().all(|pair| pair.vhost.is_some()));
}

#[tokio::test]
async fn an_invalid_nic_is_refused_by_field() {
    let (_sender, receiver) = fds::socketpair().unwrap();
    let fds = FdReceiver::new(receiver).unwrap();
    let fd = pb::Fd { token: vec![1; 16] };
    let cases: [(pb::Nic, &str); 6] = [
        (
            pb::Nic {
                id: String::new(),
                ..nic(&fd)
            },
            "nic.id is missing",
        ),
        (
            pb::Nic {
                mac: vec![2; 5],
                ..nic(&fd)
            },
            "nic.mac: must be 6 bytes",
        ),
        (
            pb::Nic {
                mtu: 1 << 16,
                ..nic(&fd)
            },
            "nic.mtu: must be at most 65535",
        ),
        (
            pb::Nic {
                taps: Vec::new(),
                ..nic(&fd)
            },
            "nic.taps: must be 1 to 127, not 0",
        ),
        (
            pb::Nic {
                vhost: vec![fd.clone(); 2],
                ..nic(&fd)
            },
            "nic.vhost: must name one descriptor for each tap, or none",
        ),
        (
            pb::Nic {
                taps: vec![pb::Fd::default()],
                ..nic(&fd)
            },
            "nic.taps[0]: ",
        ),
    ];
    for (nic, wanted) in cases {
        let error = setup(&fds, "nic", &nic).await.unwrap_err();
        assert!(error.message().starts_with(wanted), "{error}");
    }
}
