//! The agent is ready when it has all that it needs to run VMIs.

use std::sync::Arc;

use tokio::sync::watch;

use crate::service::TlsSettings;

/// The parts of the agent that take a while to be ready.
#[derive(Debug, Clone)]
pub struct Readiness {
    /// True once the VMIs of the node have been listed.
    pub vmis: watch::Receiver<bool>,
    /// Settings of the REST service.
    pub rest: watch::Receiver<Option<Arc<TlsSettings>>>,
    /// The device plugins, by name: true while the kubelet knows them.
    pub plugins: Vec<(&'static str, watch::Receiver<bool>)>,
}

impl Readiness {
    /// The missing parts, each as a sentence for the log and the probe's answer. Empty if the agent is ready.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !*self.vmis.borrow() {
            missing.push("the VMIs of the node have not been listed".to_owned());
        }
        if self.rest.borrow().is_none() {
            missing.push("the service for virt-api has no certificates or CAs".to_owned());
        }
        let plugins = self.plugins.iter();
        let absent = plugins.filter(|(_, registered)| !*registered.borrow());
        missing.extend(absent.map(|(name, _)| format!("the kubelet does not have the device {name}")));
        missing
    }
}
