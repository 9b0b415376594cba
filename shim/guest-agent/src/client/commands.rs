//! Commands of one request and one reply.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde::de::IgnoredAny;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Call, GuestAgent, NOTHING};
use crate::bounded::List;
use crate::error::AgentError;
use crate::types::{
    AgentInfo, AuthorizedKeys, FileSystem, FsFreezeStatus, HostName, LoadAverage, NetworkInterface, OsInfo,
    ShutdownMode, TimeZone, User,
};

/// All of these fail as [`AgentError`] says; the comments name only what is particular.
impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// `guest-ping`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn ping(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.order("guest-ping", limit, NOTHING).await
    }

    /// `guest-info`: version and commands.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn info(&mut self, limit: Duration) -> Result<AgentInfo, AgentError> {
        self.call(Call::new("guest-info", limit), NOTHING).await
    }

    /// `guest-get-host-name`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn host_name(&mut self, limit: Duration) -> Result<String, AgentError> {
        let reply: HostName = self
            .call(Call::new("guest-get-host-name", limit), NOTHING)
            .await?;
        Ok(reply.host_name)
    }

    /// `guest-get-timezone`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn time_zone(&mut self, limit: Duration) -> Result<TimeZone, AgentError> {
        self.call(Call::new("guest-get-timezone", limit), NOTHING).await
    }

    /// `guest-get-osinfo`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn os_info(&mut self, limit: Duration) -> Result<OsInfo, AgentError> {
        self.call(Call::new("guest-get-osinfo", limit), NOTHING).await
    }

    /// `guest-get-users`: those who are logged in.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn users(&mut self, limit: Duration) -> Result<Vec<User>, AgentError> {
        self.list("guest-get-users", limit).await
    }

    /// `guest-get-fsinfo`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn file_systems(&mut self, limit: Duration) -> Result<Vec<FileSystem>, AgentError> {
        self.list("guest-get-fsinfo", limit).await
    }

    /// `guest-network-get-interfaces`, the loopback interface included.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn network_interfaces(&mut self, limit: Duration) -> Result<Vec<NetworkInterface>, AgentError> {
        self.list("guest-network-get-interfaces", limit).await
    }

    /// `guest-get-load`, since QEMU 10.0.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn load(&mut self, limit: Duration) -> Result<LoadAverage, AgentError> {
        self.call(Call::new("guest-get-load", limit), NOTHING).await
    }

    /// `guest-fsfreeze-status`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn fsfreeze_status(&mut self, limit: Duration) -> Result<FsFreezeStatus, AgentError> {
        self.call(Call::new("guest-fsfreeze-status", limit), NOTHING)
            .await
    }

    /// `guest-fsfreeze-freeze`: freezes all local file systems and returns how many. Until they are thawed the agent
    /// refuses almost every other command.
    ///
    /// # Errors
    /// After one of the agent nothing is frozen. After another, if [`AgentError::may_take_effect`], the guest may be
    /// frozen, also later: send a thaw.
    pub async fn fsfreeze_freeze(&mut self, limit: Duration) -> Result<i64, AgentError> {
        self.call(Call::new("guest-fsfreeze-freeze", limit), NOTHING)
            .await
    }

    /// `guest-fsfreeze-thaw`: returns how many file systems were thawed.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn fsfreeze_thaw(&mut self, limit: Duration) -> Result<i64, AgentError> {
        self.call(Call::new("guest-fsfreeze-thaw", limit), NOTHING).await
    }

    /// `guest-set-user-password`. `crypted`: the password is a hash for the guest's file of passwords.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn set_user_password(
        &mut self,
        user: &str,
        password: &[u8],
        crypted: bool,
        limit: Duration,
    ) -> Result<(), AgentError> {
        #[derive(Serialize)]
        struct Password<'a> {
            username: &'a str,
            password: String,
            crypted: bool,
        }
        let arguments = Password {
            username: user,
            password: STANDARD.encode(password),
            crypted,
        };
        self.order("guest-set-user-password", limit, Some(arguments))
            .await
    }

    /// `guest-ssh-get-authorized-keys`: the lines of the user's `authorized_keys`.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn ssh_authorized_keys(
        &mut self,
        user: &str,
        limit: Duration,
    ) -> Result<Vec<String>, AgentError> {
        let arguments = Keys {
            username: user,
            keys: None,
            reset: None,
        };
        let call = Call::new("guest-ssh-get-authorized-keys", limit);
        let reply: AuthorizedKeys = self.call(call, Some(arguments)).await?;
        Ok(reply.keys)
    }

    /// `guest-ssh-add-authorized-keys`. `reset`: these keys replace all others.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn ssh_add_authorized_keys(
        &mut self,
        user: &str,
        keys: &[String],
        reset: bool,
        limit: Duration,
    ) -> Result<(), AgentError> {
        let arguments = Keys {
            username: user,
            keys: Some(keys),
            reset: Some(reset),
        };
        self.order("guest-ssh-add-authorized-keys", limit, Some(arguments))
            .await
    }

    /// `guest-ssh-remove-authorized-keys`. Keys that are not there are ignored.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn ssh_remove_authorized_keys(
        &mut self,
        user: &str,
        keys: &[String],
        limit: Duration,
    ) -> Result<(), AgentError> {
        let arguments = Keys {
            username: user,
            keys: Some(keys),
            reset: None,
        };
        self.order("guest-ssh-remove-authorized-keys", limit, Some(arguments))
            .await
    }

    /// `guest-get-time`: nanoseconds since 1970-01-01 UTC.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn time(&mut self, limit: Duration) -> Result<i64, AgentError> {
        self.call(Call::new("guest-get-time", limit), NOTHING).await
    }

    /// `guest-set-time`: nanoseconds since 1970-01-01 UTC; `None`: what the guest's RTC says.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn set_time(&mut self, time: Option<i64>, limit: Duration) -> Result<(), AgentError> {
        #[derive(Serialize)]
        struct Time {
            time: i64,
        }
        let arguments = time.map(|time| Time { time });
        self.order("guest-set-time", limit, arguments).await
    }

    /// `guest-shutdown`. The agent answers only if it fails, so this succeeds when the stream ends or the time is over.
    ///
    /// # Errors
    /// The agent reported an error in time, or did not respond to a synchronisation.
    pub async fn shutdown(&mut self, mode: ShutdownMode, limit: Duration) -> Result<(), AgentError> {
        #[derive(Serialize)]
        struct Shutdown {
            mode: ShutdownMode,
        }
        let call = Call::new("guest-shutdown", limit);
        // Otherwise a stream that is closed already would look like success.
        self.sync_for(call).await?;
        match self.call::<_, IgnoredAny>(call, Some(Shutdown { mode })).await {
            Ok(_) | Err(AgentError::Timeout { .. } | AgentError::Disconnected(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A command whose result says nothing.
    async fn order<A: Serialize>(
        &mut self,
        name: &'static str,
        limit: Duration,
        arguments: Option<A>,
    ) -> Result<(), AgentError> {
        let _: IgnoredAny = self.call(Call::new(name, limit), arguments).await?;
        Ok(())
    }

    /// A command without arguments whose result is a list.
    async fn list<T>(&mut self, name: &'static str, limit: Duration) -> Result<Vec<T>, AgentError>
    where
        List<T>: serde::de::DeserializeOwned,
    {
        let list: List<T> = self.call(Call::new(name, limit), NOTHING).await?;
        Ok(list.0)
    }
}

#[derive(Serialize)]
struct Keys<'a> {
    username: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reset: Option<bool>,
}
