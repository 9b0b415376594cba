//! The saved state of a virtio device, changed in any place, restored into a device that was built in the same way. A device
//! that refuses it is unchanged; one that takes it works on, and serves a new driver after a reset.
#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::virtio::{Restored, balloon, blk, console, net, rng, run_restored, scsi, vsock};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Device {
    Balloon(Restored<balloon::Setup, balloon::Request>),
    Blk(Restored<blk::Setup, blk::Request>),
    Console(Restored<(), console::Request>),
    Net(Restored<net::Setup, net::Request>),
    Rng(Restored<(), rng::Request>),
    Scsi(Restored<scsi::Setup, scsi::Request>),
    Vsock(Restored<(), vsock::Request>),
}

fuzz_target!(|device: Device| match device {
    Device::Balloon(program) => run_restored::<balloon::BalloonBench>(program),
    Device::Blk(program) => run_restored::<blk::BlkBench>(program),
    Device::Console(program) => run_restored::<console::ConsoleBench>(program),
    Device::Net(program) => run_restored::<net::NetBench>(program),
    Device::Rng(program) => run_restored::<rng::RngBench>(program),
    Device::Scsi(program) => run_restored::<scsi::ScsiBench>(program),
    Device::Vsock(program) => run_restored::<vsock::VsockBench>(program),
});
