//! virtio-rng.

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::rng::Rng;
use husk_devices::virtio::testing::WRITE;

use super::{Bench, Buffer, DATA, Guest, descriptors};

/// A request for random bytes.
#[derive(Arbitrary, Debug)]
pub struct Request {
    buffers: Vec<Buffer>,
    indirect: bool,
}

pub struct RngBench;

impl Bench for RngBench {
    type Setup = ();
    type Request = Request;
    type Handle = ();

    fn new((): &()) -> Self {
        Self
    }

    fn device(&mut self, _: Option<&()>) -> (Box<dyn VirtioDevice>, ()) {
        (Box::new(Rng::new()), ())
    }

    fn request(&mut self, request: &Request, (): &(), guest: &mut Guest) {
        guest.add(0, &descriptors(&request.buffers, WRITE), request.indirect);
    }

    fn check(&mut self, (): &(), guest: &mut Guest) {
        assert_eq!(guest.serve(0, &[(DATA, 64, WRITE)]), 64);
        assert_ne!(guest.get(DATA, 64), [0; 64]);
    }
}
