//! Times of a VM's start under KubeVirt, from the changes of its VMI and its pod.

use super::kubectl::Kubectl;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A part of the start: it ends with its step, and begins with the step before.
#[derive(Debug)]
struct Step {
    /// Text when it is reached.
    what: &'static str,
    /// The components that work towards it.
    by: &'static str,
    reached: fn(&Value) -> bool,
}

/// The steps in order. A Kubernetes object shows each of them.
const STEPS: &[Step] = &[
    Step {
        what: "VMI Pending",
        by: "API server, virt-controller",
        reached: |object| is(object, "VirtualMachineInstance"),
    },
    Step {
        what: "pod created",
        by: "virt-controller",
        reached: |object| is(object, "Pod"),
    },
    Step {
        what: "pod scheduled",
        by: "scheduler",
        reached: |object| object["spec"]["nodeName"].is_string() && is(object, "Pod"),
    },
    Step {
        what: "containers run",
        by: "kubelet, containerd, shim",
        reached: |object| {
            let mut statuses = object["status"]["containerStatuses"]
                .as_array()
                .into_iter()
                .flatten();
            statuses.any(|status| status["name"] == "compute" && status["state"]["running"].is_object())
        },
    },
    Step {
        what: "VMI Scheduled",
        by: "virt-controller",
        reached: |object| phase(object) == "Scheduled",
    },
    Step {
        what: "VMI Running",
        by: "husk-agent, shim, VMM",
        reached: |object| phase(object) == "Running",
    },
];

fn is(object: &Value, kind: &str) -> bool {
    object["kind"] == kind
}

/// Phase of a VMI.
fn phase(object: &Value) -> &str {
    let phase = object["status"]["phase"].as_str().unwrap_or_default();
    if is(object, "VirtualMachineInstance") {
        phase
    } else {
        ""
    }
}

/// The first change of each step.
#[derive(Debug)]
pub struct Timeline {
    watches: Vec<Child>,
    changes: Receiver<(Instant, Value)>,
    began: Instant,
    /// UID of an earlier VMI, whose changes do not count.
    earlier: String,
    /// Seconds from the start to each step that was reached; in the order of [`STEPS`].
    reached: Vec<f64>,
}

impl Timeline {
    /// Watches the VMI and the pod with the label `app`, but not the VMI with the UID `earlier` and its pod.
    pub fn watch(kubectl: &Kubectl, app: &str, earlier: &str) -> Result<Self> {
        let (sender, changes) = channel();
        let mut watches = Vec::new();
        for kind in ["vmi", "pods"] {
            let selector = format!("app={app}");
            let mut child = kubectl
                .command(&["get", kind, "-l", &selector, "--watch", "-o", "json"])
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start kubectl")?;
            let output = child.stdout.take().context("no pipe")?;
            watches.push(child);
            let sender = sender.clone();
            std::thread::spawn(move || {
                for object in serde_json::Deserializer::from_reader(output).into_iter::<Value>() {
                    let Ok(object) = object else { break };
                    if sender.send((Instant::now(), object)).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self {
            watches,
            changes,
            began: Instant::now(),
            earlier: earlier.to_owned(),
            reached: Vec::new(),
        })
    }

    /// Sets the start to now.
    pub fn start(&mut self) {
        self.began = Instant::now();
    }

    /// Seconds since the start.
    pub fn seconds(&self, when: Instant) -> f64 {
        when.saturating_duration_since(self.began).as_secs_f64()
    }

    /// Waits until the VMI runs; calls `show` with the seconds since the start and the text of each step.
    ///
    /// # Errors
    /// If that takes longer than `limit`.
    pub fn until_running(&mut self, limit: Duration, mut show: impl FnMut(f64, &str)) -> Result<()> {
        let deadline = Instant::now() + limit;
        while let Some(step) = STEPS.get(self.reached.len()) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (when, object) = match self.changes.recv_timeout(left) {
                Ok(change) => change,
                Err(RecvTimeoutError::Timeout) => bail!("no {} within {} s", step.what, limit.as_secs()),
                Err(RecvTimeoutError::Disconnected) => bail!("kubectl get --watch has ended"),
            };
            if self.is_earlier(&object) {
                continue;
            }
            // One change may show several steps, and a watch may be behind the other.
            let last = STEPS.iter().rposition(|step| (step.reached)(&object));
            while last.is_some_and(|last| self.reached.len() <= last) {
                let seconds = self.seconds(when);
                show(seconds, STEPS[self.reached.len()].what);
                self.reached.push(seconds);
            }
        }
        Ok(())
    }

    fn is_earlier(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let uids = [&metadata["uid"], &metadata["labels"]["kubevirt.io/created-by"]];
        uids.iter().any(|uid| uid.as_str() == Some(&self.earlier))
    }

    /// Seconds from the start to the step with this text, if it was reached.
    pub fn reached(&self, what: &str) -> Option<f64> {
        let index = STEPS.iter().position(|step| step.what == what)?;
        self.reached.get(index).copied()
    }

    /// Seconds of each step and its components.
    pub fn shares(&self) -> Vec<(&'static str, f64)> {
        let begins = std::iter::once(&0.0).chain(&self.reached);
        let ends = self.reached.iter().zip(begins);
        STEPS
            .iter()
            .zip(ends)
            .map(|(step, (end, begin))| (step.by, end - begin))
            .collect()
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        for watch in &mut self.watches {
            let _ = watch.kill();
            let _ = watch.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn timeline(changes: Receiver<(Instant, Value)>, began: Instant) -> Timeline {
        Timeline {
            watches: Vec::new(),
            changes,
            began,
            earlier: "old".to_owned(),
            reached: Vec::new(),
        }
    }

    #[test]
    fn a_late_watch_changes_no_order() {
        let vmi = |phase: &str| json!({"kind": "VirtualMachineInstance", "status": {"phase": phase}});
        let running = json!({"name": "compute", "state": {"running": {}}});
        let pod = json!({
            "kind": "Pod",
            "spec": {"nodeName": "node1"},
            "status": {"phase": "Running", "containerStatuses": [running]},
        });
        let (sender, changes) = channel();
        let began = Instant::now();
        let mut old = pod.clone();
        old["metadata"] = json!({"labels": {"kubevirt.io/created-by": "old"}});
        // The watch of pods is behind.
        let order = [
            old,
            vmi("Pending"),
            vmi("Scheduling"),
            vmi("Scheduled"),
            pod,
            vmi("Running"),
        ];
        for (seconds, object) in (0..).zip(order) {
            sender
                .send((began + Duration::from_secs(seconds), object))
                .expect("sent");
        }
        let mut timeline = timeline(changes, began);
        let mut shown = Vec::new();
        timeline
            .until_running(Duration::from_secs(1), |seconds, what| {
                shown.push((seconds, what.to_owned()))
            })
            .expect("running");
        let (seconds, names): (Vec<f64>, Vec<String>) = shown.into_iter().unzip();
        assert_eq!(seconds, [1.0, 3.0, 3.0, 3.0, 3.0, 5.0]);
        assert_eq!(names.last().map(String::as_str), Some("VMI Running"));
        let sum: f64 = timeline.shares().iter().map(|(_, share)| share).sum();
        assert_eq!(sum, 5.0);
    }

    #[test]
    fn a_start_that_stops_names_the_missing_step() {
        let (sender, changes) = channel();
        let vmi = json!({"kind": "VirtualMachineInstance", "status": {}});
        sender.send((Instant::now(), vmi)).expect("sent");
        let error = timeline(changes, Instant::now())
            .until_running(Duration::from_millis(20), |_, _| ())
            .expect_err("no pod");
        assert_eq!(error.to_string(), "no pod created within 0 s");
    }
}
