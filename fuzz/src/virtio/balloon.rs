//! virtio-balloon.

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::{Balloon, BalloonHandle};
use husk_devices::virtio::testing::WRITE;

use super::{Bench, DATA, Guest};

const PAGE: u64 = 4096;

#[derive(Arbitrary, Debug)]
pub struct Setup {
    reporting: bool,
}

/// The number of a page.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Page {
    Near(u8),
    Next,
    Any(u32),
}

#[derive(Arbitrary, Debug)]
pub enum Request {
    Inflate(Vec<Page>),
    Deflate(Vec<Page>),
    /// Pages and their numbers, in the reporting queue of either index.
    Report(bool, Vec<(u8, u8)>),
    Target(u64),
}

pub struct BalloonBench {
    reporting: bool,
}

impl BalloonBench {
    fn list(guest: &mut Guest, queue: usize, pages: &[Page]) {
        let (mut bytes, mut last) = (Vec::new(), (DATA / PAGE) as u32);
        for page in pages.iter().take(200) {
            last = match *page {
                Page::Near(page) => page.into(),
                Page::Next => last.wrapping_add(1),
                Page::Any(page) => page,
            };
            bytes.extend(last.to_le_bytes());
        }
        let at = guest.slot();
        guest.put(at, &bytes);
        guest.add(queue, &[(at, bytes.len() as u32, 0)], false);
    }
}

impl Bench for BalloonBench {
    type Setup = Setup;
    type Request = Request;
    type Handle = BalloonHandle;
    const DISCARDS: bool = true;

    fn new(setup: &Setup) -> Self {
        Self {
            reporting: setup.reporting,
        }
    }

    fn device(&mut self, _: Option<&BalloonHandle>) -> (Box<dyn VirtioDevice>, BalloonHandle) {
        let (balloon, handle) = Balloon::new(self.reporting);
        (Box::new(balloon), handle)
    }

    fn request(&mut self, request: &Request, handle: &BalloonHandle, guest: &mut Guest) {
        match request {
            Request::Inflate(pages) => Self::list(guest, 0, pages),
            Request::Deflate(pages) => Self::list(guest, 1, pages),
            Request::Report(gap, ranges) => {
                let queue = if *gap { 4 } else { 2 } % guest.drivers.len();
                let range = |&(page, count): &(u8, u8)| {
                    (u64::from(page) * PAGE, u32::from(count) * PAGE as u32, WRITE)
                };
                let ranges: Vec<_> = ranges.iter().take(16).map(range).collect();
                guest.add(queue, &ranges, false);
            }
            Request::Target(bytes) => {
                handle.set_target(*bytes);
                assert!(handle.target() <= *bytes);
            }
        }
    }

    fn check(&mut self, _: &BalloonHandle, guest: &mut Guest) {
        guest.put(DATA, &[7; 2 * PAGE as usize]);
        let at = guest.slot();
        guest.put(at, &((DATA / PAGE) as u32).to_le_bytes());
        guest.serve(0, &[(at, 4, 0)]);
        let left = guest.get(DATA, 2 * PAGE as usize);
        assert!(left[..PAGE as usize].iter().all(|byte| *byte == 0), "inflated");
        assert!(
            left[PAGE as usize..].iter().all(|byte| *byte == 7),
            "its neighbour"
        );
    }
}
