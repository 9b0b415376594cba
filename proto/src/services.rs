//! Several gRPC services on one socket.

use std::convert::Infallible;

use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tower::service_fn;

/// One service of two: the second has the requests to its name, the first all others. tonic's own router would add an
/// HTTP framework to every monitor.
pub fn either<A, B>(
    first: A,
    second: B,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static
where
    A: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
        + NamedService
        + Clone
        + Send
        + 'static,
{
    service_fn(move |request: Request<Body>| {
        let (mut first, mut second) = (first.clone(), second.clone());
        async move {
            let service = request.uri().path().split('/').nth(1);
            // Both are always ready.
            match service == Some(B::NAME) {
                true => second.call(request).await,
                false => first.call(request).await,
            }
        }
    })
}
