//! The service for the kubelet's probes and for Prometheus, on port 8443: `/healthz`, `/readyz` and `/metrics`, with the
//! paths and the port of virt-handler.

mod exposition;
mod health;
mod readiness;
mod scraper;
mod vmi_metrics;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::service::{Service, TlsSettings};
use crate::vmi::VmiFinder;
use health::ApiHealth;
pub use readiness::Readiness;
use scraper::Scraper;

/// Connections at the same time.
const MAX_CONNECTIONS: usize = 256;
/// Connections of one address, so that no other client keeps the kubelet's probes out.
const MAX_CONNECTIONS_OF_PEER: usize = 16;
/// Maximum time of a connection, so that a client that does not read gives up its place.
const LIFETIME: Duration = Duration::from_secs(60);

/// State that all handlers share.
#[derive(Debug, Clone)]
struct Context {
    health: ApiHealth,
    readiness: Readiness,
    scraper: Scraper,
}

/// Serves probes and scrapes of the agent on `node` until `stop` is true.
pub async fn serve(
    listener: TcpListener,
    tls: watch::Receiver<Option<Arc<TlsSettings>>>,
    node: String,
    client: Client,
    vmis: VmiFinder,
    readiness: Readiness,
    stop: watch::Receiver<bool>,
) {
    let context = Context {
        health: ApiHealth::start(client),
        scraper: Scraper::start(node, vmis, readiness.clone()),
        readiness,
    };
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(context);
    let service = Service {
        name: "monitoring",
        router,
        connections: MAX_CONNECTIONS,
        connections_per_peer: MAX_CONNECTIONS_OF_PEER,
        lifetime: Some(LIFETIME),
    };
    service.serve(listener, tls, stop).await;
}

async fn healthz(State(context): State<Context>) -> Response {
    let health = context.health.get().await;
    let code = match health.is_ok() {
        true => StatusCode::OK,
        false => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let json = [(CONTENT_TYPE, "application/json")];
    (code, json, health.json().to_string()).into_response()
}

async fn readyz(State(context): State<Context>) -> (StatusCode, String) {
    match context.readiness.missing().join("\n") {
        ready if ready.is_empty() => (StatusCode::OK, "ok".to_owned()),
        missing => (StatusCode::SERVICE_UNAVAILABLE, missing),
    }
}

async fn metrics(State(context): State<Context>) -> Response {
    match context.scraper.scrape().await {
        Some(text) => ([(CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "too many scrapes wait\n").into_response(),
    }
}

#[cfg(test)]
mod tests;
