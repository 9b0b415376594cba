//! What systemd is asked, by D-Bus. A connection is kept for as long as one thing is asked: little of it stays resident.

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

/// Where systemd listens, and how long it may take.
#[derive(Debug)]
pub(super) struct SystemdClient {
    /// The system's bus. systemd's own socket is no way past it: systemd signs what it says there with a name that is
    /// none of a bus's peers, and zbus takes no such message.
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
    /// Starts a scope with a process and limits.
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
                // One of that name which failed.
                Err(error) if is_method_error(&error, UNIT_EXISTS) => {
                    let _ = call(systemd, "ResetFailedUnit", &unit).await;
                    job(systemd, unit, "StartTransientUnit", &asked).await
                }
                // It may come yet.
                Err(error @ Error::Failure(_)) => {
                    let _ = call(systemd, "StopUnit", &(unit, "replace")).await;
                    Err(error)
                }
                done => done,
            }
        })
    }

    /// Sets the limits of a unit for as long as there is one.
    pub(super) fn limit(&self, unit: &str, limits: &[Property]) -> Result<(), CgroupError> {
        self.with_connection(unit, async |systemd: &Connection| {
            let asked = (unit, true, limits);
            call(systemd, "SetUnitProperties", &asked).await.map(drop)
        })
    }

    /// Stops a unit, and has it forgotten that it failed. Succeeds if there is none.
    pub(super) fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        self.with_connection(unit, async |systemd: &Connection| {
            match job(systemd, unit, "StopUnit", &(unit, "replace")).await {
                Err(error) if is_method_error(&error, NO_SUCH_UNIT) => return Ok(()),
                done => done?,
            }
            // As a rule it is not loaded any more by now.
            let _ = call(systemd, "ResetFailedUnit", &unit).await;
            Ok(())
        })
    }

    /// Blocks: not to be called from a task.
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
            let late = || format!("it did not do so within {} s", self.timeout.as_secs());
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

/// Calls what makes a job of a unit's, and waits for the job to end.
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
        // Signals are taken before the answer has come, too: they would be in its way.
        tokio::select! {
            answer = &mut called, if started.is_none() => started = Some(answer?.body().deserialize()?),
            signal = removed.next() => {
                let signal = signal.ok_or_else(|| Error::Failure("it closed the connection".into()))??;
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
