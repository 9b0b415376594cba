//! Connections to the ports of the fake VMM's guest.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use husk_proto::vmm::v1 as pb;
use tonic::{Response, Status};

use super::{Fake, has};

/// A port on which the guest echoes.
pub const ACCEPTS: u32 = 7;
/// A port on which nobody listens.
pub const REFUSES: u32 = 8;
/// A port that has the guest connect to the same port of the host, and tell what came of it.
pub const ASKS: u32 = 5000;

impl Fake {
    pub(super) async fn connect(
        &self,
        request: pb::ConnectVsockRequest,
    ) -> Result<Response<pb::ConnectVsockResponse>, Status> {
        let pb::ConnectVsockRequest { port, stream } = request;
        let mut stream = UnixStream::from(OwnedFd::from(self.take(&stream.unwrap()).await?));
        stream.set_nonblocking(false)?;
        match port {
            ACCEPTS => {
                stream.write_all(b"OK 1073741824\n")?;
                std::thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut { stream }));
            }
            ASKS => {
                self.asking.lock().unwrap().push(stream);
                let id = port.into();
                self.vsock.send(pb::VsockRequest { id, port }).unwrap();
            }
            _ => return Err(Status::failed_precondition("no driver")),
        }
        Ok(Response::new(pb::ConnectVsockResponse {}))
    }

    pub(super) async fn answer(
        &self,
        request: pb::AnswerVsockRequest,
    ) -> Result<Response<pb::AnswerVsockResponse>, Status> {
        let mut asking = self.asking.lock().unwrap().pop().unwrap();
        if has(&self.name(), "answers-nobody") {
            return Err(Status::internal("no ".repeat(1000)));
        }
        match request.stream {
            Some(stream) => {
                let mut stream = UnixStream::from(OwnedFd::from(self.take(&stream).await?));
                stream.write_all(b"from the guest")?;
                asking.write_all(b"accepted")?;
            }
            None => asking.write_all(b"refused")?,
        }
        Ok(Response::new(pb::AnswerVsockResponse {}))
    }
}
