//! The routes of the service without a cluster, for fuzz targets.

use std::convert::Infallible;

use axum::Router;
use axum::http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::Value;
use tonic::transport::Channel;

use super::{Context, VsockCertificateDir, router};
use crate::event::EventSender;
use crate::vmi::{Vmi, VmiFinder};

/// The routes of an agent whose only VM is that of `vmi`, with this channel to its shim. The API server takes every
/// event. `None` if it is no object. Must be called on a tokio runtime.
#[must_use]
pub fn routes(vmi: Value, shim: Channel) -> Option<Router> {
    let vmi = Vmi(serde_json::from_value(vmi).ok()?);
    let api = tower::service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::from(b"{}".to_vec())))
    });
    Some(router(Context::new(
        VmiFinder::of_one(vmi, shim),
        EventSender::new(Client::new(api, "default"), "node".to_owned()),
        VsockCertificateDir("/nonexistent".into()),
    )))
}
