//! Requests to systemd over D-Bus. A connection lives for one request, which keeps little memory resident.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt;
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::timeout;
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::zvariant::{DynamicType, OwnedObjectPath, Value};
use zbus::{Connection, Error, MatchRule, Message, MessageStream};

use super::CgroupError;
use super::properties::Property;
use super::scope::Scope;

const DESTINATION: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// Client of systemd's manager interface.
#[derive(Debug)]
pub(super) struct SystemdClient {
    /// Socket of the system bus. systemd's private socket does not work: systemd signs its messages there with a sender
    /// that is not a peer of a bus, and zbus rejects them.
    pub(super) bus: PathBuf,
    pub(super) timeout: Duration,
}

impl Default for SystemdClient {
    fn default() -> SystemdClient {
        SystemdClient {
            bus: "/run/dbus/system_bus_socket".into(),
            timeout: Duration::from_secs(10),
        }
    }
}

impl SystemdClient {
    /// Starts a transient scope with one process and limits.
    pub(super) fn start(&self, scope: &Scope, pid: u32, limits: Vec<Property>) -> Result<(), CgroupError> {
        let unit = scope.unit.as_str();
        let mut properties: Vec<Property> = vec![
            ("Description", format!("husk container {unit}").into()),
            ("Slice", scope.slice.clone().into()),
            ("PIDs", vec![pid].into()),
            ("Delegate", true.into()),
            ("DefaultDependencies", false.into()),
            ("CollectMode", "inactive-or-failed".into()),
            ("CPUAccounting", true.into()),
            ("IOAccounting", true.into()),
            ("MemoryAccounting", true.into()),
            ("TasksAccounting", true.into()),
        ];
        properties.extend(limits);
        let auxiliary: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        let asked = (unit, "fail", properties, auxiliary);
        self.with_connection(unit, async |systemd: &Connection| {
            match job(systemd, unit, "StartTransientUnit", &asked).await {
                // A failed unit of the same name is still loaded.
                Err(error) if is_method_error(&error, UNIT_EXISTS) => {
                    let _ = call(systemd, "ResetFailedUnit", &unit).await;
                    job(systemd, unit, "StartTransientUnit", &asked).await
                }
                // The job may still finish after the timeout or error.
                Err(error @ Error::Failure(_)) => {
                    let _ = call(systemd, "StopUnit", &(unit, "replace")).await;
                    Err(error)
                }
                done => done,
            }
        })
    }

    /// Sets the limits of a unit while it is loaded.
    pub(super) fn limit(&self, unit: &str, limits: &[Property]) -> Result<(), CgroupError> {
        self.with_connection(unit, async |systemd: &Connection| {
            let asked = (unit, true, limits);
            call(systemd, "SetUnitProperties", &asked).await.map(drop)
        })
    }

    /// Stops a unit and resets its failed state. Succeeds if the unit does not exist.
    pub(super) fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        self.with_connection(unit, async |systemd: &Connection| {
            match job(systemd, unit, "StopUnit", &(unit, "replace")).await {
                Err(error) if is_method_error(&error, NO_SUCH_UNIT) => return Ok(()),
                done => done?,
            }
            // Usually the unit is not loaded any more.
            let _ = call(systemd, "ResetFailedUnit", &unit).await;
            Ok(())
        })
    }

    /// Connects and runs `request`. Blocks: do not call it from an async task.
    fn with_connection(
        &self,
        unit: &str,
        request: impl AsyncFnOnce(&Connection) -> Result<(), Error>,
    ) -> Result<(), CgroupError> {
        let failed = |reason: String| CgroupError::Systemd {
            unit: unit.to_owned(),
            reason,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(error.to_string()))?;
        let asked = async {
            let systemd = self.connect().await.map_err(|error| CgroupError::NoSystemd {
                unit: unit.to_owned(),
                bus: self.bus.clone(),
                reason: error.to_string(),
            })?;
            request(&systemd).await.map_err(|error| failed(error.to_string()))
        };
        runtime.block_on(async {
            let late = || format!("no answer within {} s", self.timeout.as_secs());
            let answered = timeout(self.timeout, asked).await;
            answered.unwrap_or_else(|_| Err(failed(late())))
        })
    }

    async fn connect(&self) -> Result<Connection, Error> {
        let stream = UnixStream::connect(&self.bus).await?;
        Builder::unix_stream(stream).build().await
    }
}

fn is_method_error(error: &Error, wanted: &str) -> bool {
    matches!(error, Error::MethodError(name, ..) if name.as_str() == wanted)
}

async fn call<B>(systemd: &Connection, method: &str, body: &B) -> Result<Message, Error>
where
    B: Serialize + DynamicType,
{
    systemd
        .call_method(Some(DESTINATION), PATH, Some(MANAGER), method, body)
        .await
}

/// Calls a method that starts a job of `unit`, and waits for the job to end.
async fn job<B>(systemd: &Connection, unit: &str, method: &str, body: &B) -> Result<(), Error>
where
    B: Serialize + DynamicType,
{
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .path(PATH)?
        .interface(MANAGER)?
        .member("JobRemoved")?
        .build();
    let mut removed = MessageStream::for_match_rule(rule, systemd, None).await?;
    call(systemd, "Subscribe", &()).await?;
    let mut called = pin!(call(systemd, method, body));
    let mut started: Option<OwnedObjectPath> = None;
    let mut ended: Vec<(OwnedObjectPath, String)> = Vec::new();
    loop {
        // Signals are read before the reply arrives too, or they would block it.
        tokio::select! {
            answer = &mut called, if started.is_none() => started = Some(answer?.body().deserialize()?),
            signal = removed.next() => {
                let signal = signal.ok_or_else(|| Error::Failure("the connection was closed".into()))??;
                let (_, job, of, result): (u32, OwnedObjectPath, String, String) = signal.body().deserialize()?;
                if of == unit {
                    ended.push((job, result));
                }
            }
        }
        let own = |(job, _): &&(OwnedObjectPath, String)| Some(job) == started.as_ref();
        match ended.iter().find(own) {
            Some((_, result)) if result == "done" => return Ok(()),
            Some((_, result)) => return Err(Error::Failure(format!("{method} ended as {result}"))),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
