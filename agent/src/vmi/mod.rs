//! The VMIs of the node: a watch of their objects, and an actor for each.

mod actor;
mod attachment;
mod awaited;
mod container;
mod finder;
mod foreign;
mod guest_panics;
mod object;
mod pod;
mod status;
mod sync_call;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use kube::core::DynamicObject;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::warn;

use crate::event::EventSender;
use crate::watching::{WatchError, backoff, stopped, watch_config};
use actor::VmiActor;
pub use attachment::{LAUNCHER_VOLUME, PodsDir};
use finder::{FinderChannels, Query};
pub use finder::{RunningVm, VmiFinder};
use foreign::ForeignList;
pub use foreign::ForeignVmis;
pub use object::Vmi;
pub use pod::RuntimeDir;
pub use status::os_info;

/// Label of the VMIs that virt-controller has given to a node.
const NODE_LABEL: &str = "kubevirt.io/nodeName";

/// Watches the VMIs of a node and runs an actor for each.
pub struct VmiController {
    node: String,
    runtime: RuntimeDir,
    pods: PodsDir,
    client: Client,
    events: EventSender,
    /// The objects' channels to their actors, by UID: a VMI of the same name may come before the old one is gone.
    objects: HashMap<String, watch::Sender<Option<Arc<Vmi>>>>,
    actors: JoinSet<String>,
    /// UIDs of a list that is being read.
    listed: HashSet<String>,
    finder: FinderChannels,
    foreign: ForeignList,
    /// The VMIs that have not ended; none before the first list.
    present: watch::Sender<Option<BTreeSet<String>>>,
}

impl std::fmt::Debug for VmiController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmiController")
            .field("node", &self.node)
            .field("vmis", &self.objects.len())
            .finish_non_exhaustive()
    }
}

impl VmiController {
    /// A controller on `node`, the means to find its VMs, and the VMIs that are not Husk's.
    #[must_use]
    pub fn new(
        node: String,
        runtime: RuntimeDir,
        pods: PodsDir,
        client: Client,
        events: EventSender,
    ) -> (VmiController, VmiFinder, ForeignVmis) {
        let (finder, channels) = VmiFinder::new();
        let (foreign, foreign_vmis) = ForeignList::new();
        let controller = VmiController {
            node,
            runtime,
            pods,
            client,
            events,
            objects: HashMap::new(),
            actors: JoinSet::new(),
            listed: HashSet::new(),
            finder: channels,
            foreign,
            present: watch::Sender::new(None),
        };
        (controller, finder, foreign_vmis)
    }

    /// The VMIs of the node that have not ended, as `NAMESPACE/NAME`.
    #[must_use]
    pub fn present(&self) -> watch::Receiver<Option<BTreeSet<String>>> {
        self.present.subscribe()
    }

    /// Runs until `stop` is true. VMs go on.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &object::resource());
        let config = watch_config().labels(&format!("{NODE_LABEL}={}", self.node));
        let stream = watcher(api, config)
            .modify(object::forget_managers)
            .backoff(backoff());
        let mut stream = std::pin::pin!(stream);
        let mut failure = WatchError::default();
        loop {
            tokio::select! {
                event = stream.try_next() => match event {
                    Ok(Some(event)) => {
                        if !matches!(event, Event::Init) {
                            failure.clear();
                        }
                        let is_listed = matches!(event, Event::InitDone) || self.present.borrow().is_some();
                        self.take(event);
                        if is_listed {
                            self.publish();
                        }
                    }
                    // The stream goes on with a delay, and with a list where it must.
                    Err(error) => failure.log("VirtualMachineInstance", &error),
                    // It has no end.
                    Ok(None) => tokio::time::sleep(Duration::from_secs(1)).await,
                },
                Some(query) = self.finder.queries.recv() => self.answer(query),
                Some(ended) = self.actors.join_next() => self.ended(ended),
                () = stopped(&mut stop) => return,
            }
        }
    }

    fn take(&mut self, event: Event<DynamicObject>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(object) => {
                let vmi = Vmi(object);
                self.listed.insert(vmi.uid().to_owned());
                self.update(vmi);
            }
            Event::InitDone => {
                for (uid, object) in &self.objects {
                    if !self.listed.contains(uid) {
                        object.send_replace(None);
                    }
                }
                self.listed.clear();
                self.finder.listed.send_replace(true);
                let vmis: Vec<_> = self
                    .objects
                    .values()
                    .filter_map(|object| object.borrow().clone())
                    .collect();
                let pods = vmis.iter().flat_map(|vmi| vmi.pods_on(&self.node)).collect();
                self.runtime.forget_others(&pods);
            }
            Event::Apply(object) => self.update(Vmi(object)),
            Event::Delete(object) => {
                if let Some(object) = self.objects.get(Vmi(object).uid()) {
                    object.send_replace(None);
                }
            }
        }
    }

    fn publish(&self) {
        let vmis = self.objects.values().filter_map(|object| object.borrow().clone());
        let names = vmis
            .filter(|vmi| !vmi.is_final())
            .map(|vmi| format!("{}/{}", vmi.namespace(), vmi.name()));
        let names: BTreeSet<_> = names.collect();
        self.present.send_if_modified(|present| {
            let is_other = present.as_ref() != Some(&names);
            *present = Some(names);
            is_other
        });
    }

    fn update(&mut self, vmi: Vmi) {
        let uid = vmi.uid().to_owned();
        let vmi = Some(Arc::new(vmi));
        if let Some(object) = self.objects.get(&uid) {
            object.send_replace(vmi);
            return;
        }
        let (sender, receiver) = watch::channel(vmi);
        let actor = VmiActor::new(
            self.node.clone(),
            (self.runtime.clone(), self.pods.clone()),
            self.client.clone(),
            self.events.clone(),
            self.foreign.entry(),
            self.finder.panics.clone(),
            receiver,
        );
        self.objects.insert(uid.clone(), sender);
        self.actors.spawn(async move {
            actor.run().await;
            uid
        });
    }

    fn answer(&self, query: Query) {
        let vmis = self.objects.values().filter_map(|object| object.borrow().clone());
        let mut alive = vmis.filter(|vmi| matches!(vmi.phase(), "Scheduled" | "Running"));
        match query {
            Query::Find {
                namespace,
                name,
                reply,
            } => {
                let vmi = alive.find(|vmi| vmi.namespace() == namespace && vmi.name() == name);
                let _ = reply.send(vmi.and_then(|vmi| self.running(vmi)));
            }
            Query::All(reply) => {
                // While a list is read, a VMI may be there with one of the same name that has been deleted.
                let names = alive.map(|vmi| ((vmi.namespace(), vmi.name()), vmi));
                let vmis: BTreeMap<_, _> = names.collect();
                let all = vmis.into_values().filter_map(|vmi| self.running(vmi));
                let _ = reply.send(all.collect());
            }
        }
    }

    /// The VMI with its pod's shim, if it runs under Husk.
    fn running(&self, vmi: Arc<Vmi>) -> Option<RunningVm> {
        let (client, guest) = vmi
            .pods_on(&self.node)
            .into_iter()
            .find_map(|uid| pod::live_clients(&self.runtime, uid))?;
        Some(RunningVm { vmi, client, guest })
    }

    fn ended(&mut self, ended: Result<String, tokio::task::JoinError>) {
        match ended {
            Ok(uid) => drop(self.objects.remove(&uid)),
            // The other actors go on; the object's next change finds no receiver, and starts a new actor.
            Err(error) => {
                warn!(%error, "the actor of a VMI failed");
                self.objects.retain(|_, object| !object.is_closed());
            }
        }
    }
}

#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;
