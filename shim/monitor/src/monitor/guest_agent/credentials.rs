//! Propagates access credentials by the guest's agent: public keys and passwords of Secrets, which the kubelet changes
//! while the VM runs. Intervals and texts are KubeVirt's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use husk_guest_agent::{RequiredCommands, visible};
use husk_proto::shim::v1::CredentialsState;
use husk_vmi::{AgentCredential, CredentialsPlan};
use husk_volumes::{VolumeFault, passwords, public_keys};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use super::AgentHandle;

/// Interval at which the Secrets are read. A change of a few files in a row is one change then.
const READ_EVERY: Duration = Duration::from_secs(15);
/// Interval at which unchanged credentials are set again: a user of the guest may have changed them.
const REPEAT_EVERY: Duration = Duration::from_secs(300);

/// The content of the Secrets. It has no `Debug`, so that no log shows it.
#[derive(Clone, Default, PartialEq, Eq)]
struct Credentials {
    /// Public keys by user.
    keys: BTreeMap<String, Vec<String>>,
    /// Passwords by user.
    passwords: BTreeMap<String, String>,
}

/// Returns the agent commands that a VM's access credentials require.
pub(in crate::monitor) fn needs(plan: &CredentialsPlan) -> RequiredCommands {
    let has = |is: fn(&AgentCredential) -> bool| plan.by_agent.iter().any(is);
    RequiredCommands {
        ssh: has(|credential| matches!(credential, AgentCredential::PublicKeys { .. })),
        password: has(|credential| matches!(credential, AgentCredential::Passwords { .. })),
    }
}

/// Propagates the credentials until the VM has ended. Returns at once if there are none.
pub(in crate::monitor) async fn propagate(plan: CredentialsPlan, agent: AgentHandle) {
    if plan.by_agent.is_empty() {
        return;
    }
    let mut guest = agent.watch();
    let mut done: Option<(Credentials, Instant)> = None;
    loop {
        let connected = guest.borrow_and_update().connected;
        let (result, set) = match connected {
            false => (Err("Guest agent is offline".to_owned()), None),
            true => match read(&plan).await {
                Ok(now)
                    if done
                        .as_ref()
                        .is_some_and(|(set, at)| *set == now && at.elapsed() < REPEAT_EVERY) =>
                {
                    (Ok(()), done.take())
                }
                Ok(now) => {
                    let result = set(&now, &agent).await;
                    let set = result.is_ok().then(|| (now, Instant::now()));
                    (result, set)
                }
                Err(error) => (Err(error), None),
            },
        };
        done = set;
        if let Err(message) = &result {
            debug!(message, "access credentials");
        }
        let state = CredentialsState {
            synchronized: result.is_ok(),
            message: result.err().map(|text| visible(&text)).unwrap_or_default(),
        };
        agent.synchronized(state).await;
        let changed = async {
            // An agent that comes back may be that of a restarted guest.
            while guest.changed().await.is_ok() {
                if guest.borrow_and_update().connected != connected {
                    return true;
                }
            }
            false
        };
        match timeout(READ_EVERY, changed).await {
            Ok(true) => done = None,
            Ok(false) => return,
            Err(_) => {}
        }
    }
}

async fn read(plan: &CredentialsPlan) -> Result<Credentials, String> {
    let plan = plan.clone();
    let read = spawn_blocking(move || read_secrets(&plan)).await;
    read.unwrap_or_else(|error: JoinError| Err(error.to_string()))
}

fn read_secrets(plan: &CredentialsPlan) -> Result<Credentials, String> {
    let dir = |secret: &String| plan.secrets.get(secret).cloned().unwrap_or_default();
    let failed = |secret: &String, dir: PathBuf, fault: VolumeFault| {
        warn!(secret, dir = %dir.display(), %fault, "a Secret with access credentials");
        format!("the Secret {secret} cannot be read")
    };
    let mut read = Credentials::default();
    for credential in &plan.by_agent {
        match credential {
            AgentCredential::PublicKeys { secret, users } => {
                let keys = public_keys(&dir(secret)).map_err(|fault| failed(secret, dir(secret), fault))?;
                for user in users {
                    let of_user = read.keys.entry(user.clone()).or_default();
                    of_user.extend(keys.iter().cloned());
                }
            }
            AgentCredential::Passwords { secret } => {
                let users = passwords(&dir(secret)).map_err(|fault| failed(secret, dir(secret), fault))?;
                read.passwords.extend(users);
            }
        }
    }
    Ok(read)
}

/// Sets all credentials. One that cannot be set does not keep the others from it; the last error is returned.
async fn set(credentials: &Credentials, agent: &AgentHandle) -> Result<(), String> {
    let mut result = Ok(());
    for (user, keys) in &credentials.keys {
        if let Err(error) = agent.set_keys(user, keys.clone()).await {
            result = Err(format!(
                "Error encountered writing ssh pub key access credentials for user [{user}]: {error}"
            ));
        }
    }
    for (user, password) in &credentials.passwords {
        if let Err(error) = agent.set_password(user, password.clone().into_bytes()).await {
            result = Err(format!(
                "Error encountered setting password for user [{user}]: {error}"
            ));
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::super::tests::Guest;
    use super::*;

    #[tokio::test]
    async fn secrets_are_set_when_the_agent_comes_and_when_they_change() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "ssh-ed25519 A").unwrap();
        let secret = "keys".to_owned();
        let plan = CredentialsPlan {
            secrets: [(secret.clone(), dir.path().to_owned())].into(),
            by_agent: vec![AgentCredential::PublicKeys {
                secret,
                users: vec!["root".to_owned()],
            }],
        };
        assert!(needs(&plan).ssh && !needs(&plan).password);
        let guest = Guest::start();
        let state = |guest: &Guest| guest.agent.watch().borrow().credentials.clone();
        let task = tokio::spawn(propagate(plan, guest.agent.clone()));
        guest.until(|guest| state(guest).is_some()).await;
        let offline = state(&guest).unwrap();
        assert_eq!(
            (offline.synchronized, offline.message.as_str()),
            (false, "Guest agent is offline")
        );
        guest.open(true);
        guest
            .until(|guest| state(guest).is_some_and(|state| state.synchronized))
            .await;
        assert!(guest.had("guest-ssh-add-authorized-keys"));
        std::fs::remove_dir_all(dir.path()).unwrap();
        guest.open(false);
        guest
            .until(|guest| state(guest).is_some_and(|state| !state.synchronized))
            .await;
        guest.open(true);
        let unread = "the Secret keys cannot be read";
        guest
            .until(|guest| state(guest).is_some_and(|state| state.message == unread))
            .await;
        drop(guest);
        task.await.unwrap();
    }

    #[test]
    fn keys_of_a_user_come_from_all_of_its_secrets() {
        let secret = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            for (key, value) in files {
                std::fs::write(dir.path().join(key), value).unwrap();
            }
            dir
        };
        let dirs = [
            ("a", secret(&[("1", "key A\nkey B")])),
            ("b", secret(&[("1", "key C")])),
            ("p", secret(&[("root", "secret\n")])),
        ];
        let keys = |secret: &str, users: &[&str]| AgentCredential::PublicKeys {
            secret: secret.to_owned(),
            users: users.iter().map(ToString::to_string).collect(),
        };
        let plan = CredentialsPlan {
            secrets: dirs
                .iter()
                .map(|(name, dir)| ((*name).to_owned(), dir.path().to_owned()))
                .collect(),
            by_agent: vec![
                keys("a", &["root"]),
                keys("b", &["root", "debian"]),
                AgentCredential::Passwords {
                    secret: "p".to_owned(),
                },
            ],
        };
        let read = read_secrets(&plan).unwrap();
        assert_eq!(read.keys["root"], ["key A", "key B", "key C"]);
        assert_eq!(read.keys["debian"], ["key C"]);
        assert_eq!(read.passwords["root"], "secret");
    }
}
