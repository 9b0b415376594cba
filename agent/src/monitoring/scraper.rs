//! Asks the shims of the node for their metrics: one scrape at a time, with all shims at once, within a bounded time.

use std::time::Duration;

use axum::body::Bytes;
use futures_util::{StreamExt, stream};
use husk_proto::shim::v1::{InfoRequest, InfoResponse};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::exposition::{Metric, Number, Samples};
use super::readiness::Readiness;
use super::vmi_metrics;
use crate::vmi::{RunningVm, VmiFinder};

/// Shims that are asked at the same time.
const CONCURRENCY: usize = 64;
/// Maximum time of one shim. A shim whose VMM hangs answers after two seconds, without the VMM's counters.
const SHIM_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time of a scrape. Prometheus waits ten seconds by default.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(8);
/// Requests that wait at the same time.
const QUEUE: usize = 16;

const AGENT: Metric = Metric::gauge("husk_agent_info", "The agent's version. Always 1.");
const READY: Metric = Metric::gauge(
    "kubevirt_virt_handler_ready_status",
    "1 if the agent, which stands in the place of virt-handler, is ready.",
);
const VMIS: Metric = Metric::gauge(
    "husk_agent_vmis",
    "VMIs of the node whose launcher pods run under Husk.",
);

const PANICS: Metric = Metric::counter(
    "kubevirt_vmi_guest_os_panic",
    "Panics of the guest since the agent's start.",
);

/// Scrapes the node.
#[derive(Debug, Clone)]
pub(super) struct Scraper(mpsc::Sender<oneshot::Sender<Bytes>>);

impl Scraper {
    /// Starts the task, which ends with the last handle.
    pub(super) fn start(node: String, vmis: VmiFinder, readiness: Readiness) -> Scraper {
        let (sender, requests) = mpsc::channel(QUEUE);
        tokio::spawn(answer(node, vmis, readiness, requests));
        Scraper(sender)
    }

    /// The metrics as text; `None` if too many requests wait.
    pub(super) async fn scrape(&self) -> Option<Bytes> {
        let (reply, text) = oneshot::channel();
        self.0.try_send(reply).ok()?;
        text.await.ok()
    }
}

async fn answer(
    node: String,
    vmis: VmiFinder,
    readiness: Readiness,
    mut requests: mpsc::Receiver<oneshot::Sender<Bytes>>,
) {
    while let Some(first) = requests.recv().await {
        let mut samples = Samples::default();
        let version = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        samples.add(AGENT, version, Number::Whole(1));
        let ready = Number::Whole(readiness.missing().is_empty().into());
        samples.add(READY, Vec::new(), ready);
        let answers = ask(vmis.all().await).await;
        samples.add(VMIS, Vec::new(), Number::Whole(answers.len() as u64));
        for (vm, answer) in &answers {
            vmi_metrics::add(&mut samples, &node, &vm.vmi, answer.as_ref());
        }
        for ((namespace, name), count) in vmis.panics().all() {
            let labels = [
                ("namespace", namespace.as_str()),
                ("name", name.as_str()),
                // pvpanic tells no more.
                ("type", "unknown"),
                ("bugcheck_code", "unknown"),
            ];
            let labels = labels.map(|(label, value)| (label.to_owned(), value.to_owned()));
            samples.add(PANICS, labels.into(), Number::Whole(count));
        }
        let text = Bytes::from(samples.text());
        let _ = first.send(text.clone());
        // Who has asked in the meantime gets the same text.
        while let Ok(other) = requests.try_recv() {
            let _ = other.send(text.clone());
        }
    }
}

/// The answers of all shims, as far as they come in time.
async fn ask(vms: Vec<RunningVm>) -> Vec<(RunningVm, Option<InfoResponse>)> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    let clients: Vec<_> = vms.iter().map(|vm| vm.client.clone()).collect();
    let calls = clients
        .into_iter()
        .enumerate()
        .map(|(index, mut client)| async move {
            let call = timeout(SHIM_TIMEOUT, client.info(InfoRequest {})).await;
            (index, call.ok().and_then(Result::ok))
        });
    let mut calls = stream::iter(calls).buffer_unordered(CONCURRENCY);
    let mut answers: Vec<Option<InfoResponse>> = vec![None; vms.len()];
    while let Ok(Some((index, answer))) = timeout_at(deadline, calls.next()).await {
        match answer {
            Some(answer) => answers[index] = Some(answer.into_inner()),
            None => debug!(vmi = vms[index].vmi.name(), "the shim did not answer a scrape"),
        }
    }
    vms.into_iter().zip(answers).collect()
}
