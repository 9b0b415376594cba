//! The gRPC service `husk.shim.v1.Guest` of one VM.

use std::time::{Duration, Instant};

use husk_guest_agent::{Exec, FreezeGuard};
use husk_proto::shim::v1::guest_server::Guest;
use husk_proto::shim::v1::{
    GuestExecRequest, GuestExecResponse, GuestFreezeRequest, GuestFreezeResponse, GuestInfoRequest,
    GuestInfoResponse, GuestThawRequest, GuestThawResponse,
};
use tonic::{Request, Response, Status};

use super::AgentHandle;
use super::handle::exit_status;

/// Maximum time of a command in the guest whose caller names none.
const EXEC_WITHIN: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(in crate::monitor) struct GuestService {
    agent: AgentHandle,
}

impl GuestService {
    pub(in crate::monitor) fn new(agent: AgentHandle) -> GuestService {
        GuestService { agent }
    }
}

#[tonic::async_trait]
impl Guest for GuestService {
    async fn info(&self, _: Request<GuestInfoRequest>) -> Result<Response<GuestInfoResponse>, Status> {
        Ok(Response::new(self.agent.info()))
    }

    async fn exec(&self, request: Request<GuestExecRequest>) -> Result<Response<GuestExecResponse>, Status> {
        let request = request.into_inner();
        let limit = match request.timeout_seconds {
            0 => EXEC_WITHIN,
            seconds => Duration::from_secs(seconds.into()),
        };
        let exec = Exec {
            env: request.environment,
            input: request.input,
            ..Exec::new(request.program, request.arguments)
        };
        let output = self.agent.exec(exec, limit).await?;
        Ok(Response::new(GuestExecResponse {
            exit_code: exit_status(&output)?,
            stdout: output.stdout,
            stderr: output.stderr,
        }))
    }

    async fn freeze(
        &self,
        request: Request<GuestFreezeRequest>,
    ) -> Result<Response<GuestFreezeResponse>, Status> {
        let timeout = match request.into_inner().thaw_seconds {
            None => Some(FreezeGuard::DEFAULT_TIMEOUT),
            Some(0) => None,
            Some(seconds) => Some(Duration::from_secs(seconds.into())),
        };
        let frozen = self.agent.freeze(timeout).await?;
        let left = |time: Instant| time.saturating_duration_since(Instant::now()).as_secs();
        Ok(Response::new(GuestFreezeResponse {
            already_frozen: frozen.already,
            thaw_seconds: frozen.thaw_at.map(left),
        }))
    }

    async fn thaw(&self, _: Request<GuestThawRequest>) -> Result<Response<GuestThawResponse>, Status> {
        let was_frozen = self.agent.thaw().await?;
        Ok(Response::new(GuestThawResponse { was_frozen }))
    }
}
