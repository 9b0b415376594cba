//! A change of containerd's configuration: journalled, checked, put into effect by a restart, and undone if that fails.

use std::path::Path;

use super::containerd::{Containerd, Dump};
use super::installation::Installation;
use super::journal::{self, ConfigFile, Journal};
use super::options::Options;
use super::store::Store;
use super::{cri, of_config, service};
use crate::failure::Failure;
use crate::output;

/// Name of Husk's handler.
const HANDLER: &str = "husk";

/// The files to change in the configuration at this path, of a containerd that merges imported files or does not.
type Plan<'a> = &'a dyn Fn(&Path, bool) -> Result<Vec<ConfigFile>, Failure>;
/// A check of containerd's settings.
type Check<'a> = &'a dyn Fn(&Dump) -> Result<(), String>;

/// The node's containerd, and the journal of its changes.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub(super) containerd: Containerd,
    store: &'a Store,
    options: &'a Options,
    socket: &'a Path,
    interrupted: Option<Journal>,
}

impl<'a> Node<'a> {
    /// Finds containerd. Undoes a change that was interrupted.
    pub(super) fn find(
        store: &'a Store,
        options: &'a Options,
        installation: &'a Installation,
    ) -> Result<Node<'a>, Failure> {
        let interrupted = Journal::read(&store.journal())?;
        let socket = &installation.socket;
        let containerd = Containerd::find(socket, installation.config.as_deref(), interrupted.as_ref())?;
        if let Some(journal) = &interrupted {
            output::print("an earlier command was interrupted: repeating its change\n")?;
            journal.undo()?;
        }
        Ok(Node {
            containerd,
            store,
            options,
            socket,
            interrupted,
        })
    }

    /// Makes a change called `what`, and restarts containerd if that changes its settings.
    pub(super) fn change(&self, what: &str, plan: Plan<'_>, check: Check<'_>) -> Result<(), Failure> {
        let config = &self.containerd.config;
        let before = self.containerd.dump().map_err(|why| {
            self.of_config()(format!(
                "containerd rejects it already without a change: {why}: correct it"
            ))
        })?;
        let files = plan(config, before.merges())?;
        if files.is_empty() && self.interrupted.is_none() {
            check(&before).map_err(self.of_config())?;
            return output::print(&format!("unchanged {}\n", config.display()));
        }
        let unit = match (&self.interrupted, self.containerd.pid) {
            (Some(journal), None) => journal.unit.clone(),
            (_, pid) => service::unit_of(pid.unwrap_or(0))?,
        };
        let journal = Journal {
            files,
            program: self.containerd.program.clone(),
            config: config.clone(),
            unit,
        };
        journal.write(&self.store.journal())?;
        let after = self.apply(&journal, what, &before, check);
        let after = match after {
            Ok(after) => after,
            Err(why) => {
                journal.undo()?;
                // containerd may have ended with the earlier change.
                match self.interrupted {
                    None => journal::forget(&self.store.journal())?,
                    Some(_) => self.restart_and_forget(&journal, self.containerd.pid)?,
                }
                return Err(why);
            }
        };
        if after.is_same(&before) && self.interrupted.is_none() {
            return journal::forget(&self.store.journal());
        }
        output::print(&format!("restarting containerd ({})\n", journal.unit))?;
        if let Err(why) = self.restart(&journal, self.containerd.pid) {
            return Err(self.back_out(&journal, what, &why));
        }
        journal::forget(&self.store.journal())?;
        output::print("containerd answers\n")
    }

    /// Writes the files and asks containerd what it makes of them.
    fn apply(&self, journal: &Journal, what: &str, before: &Dump, check: Check<'_>) -> Result<Dump, Failure> {
        for file in &journal.files {
            super::super::print_change(file.apply()?, &file.path)?;
        }
        let checked = self.containerd.dump().and_then(|after| {
            check(&after)?;
            let (old, new) = (before.handlers(), after.handlers());
            match old.difference(&new).find(|name| *name != HANDLER) {
                Some(lost) => Err(format!("it would lose the runtime handler {lost}")),
                None => Ok(after),
            }
        });
        checked.map_err(|why| {
            self.of_config()(format!(
                "containerd would not run with {what}, so nothing was changed: {why}"
            ))
        })
    }

    /// Restores the former configuration after a restart that failed because of `why`.
    fn back_out(&self, journal: &Journal, what: &str, why: &str) -> Failure {
        if let Err(failure) = journal.undo() {
            return failure;
        }
        let unit = &journal.unit;
        match self.restart_and_forget(journal, None) {
            Ok(()) => Failure::Runtime(format!(
                "containerd did not run with {what}, so its former configuration is back, and it runs: {why}: see \
                 `journalctl -u {unit}`"
            )),
            Err(Failure::Runtime(again)) => Failure::Runtime(format!(
                "containerd did not run with {what} ({why}), nor with its former configuration, which is back \
                 ({again}): see `journalctl -u {unit}`"
            )),
            Err(other) => other,
        }
    }

    fn restart_and_forget(&self, journal: &Journal, former: Option<i32>) -> Result<(), Failure> {
        self.restart(journal, former).map_err(Failure::Runtime)?;
        journal::forget(&self.store.journal())
    }

    fn restart(&self, journal: &Journal, former: Option<i32>) -> Result<(), String> {
        service::restart(&journal.unit, self.options.wait())?;
        cri::wait(self.socket, former, self.options.wait())
    }

    /// Named by the file of the configuration.
    pub(super) fn of_config(&self) -> impl Fn(String) -> Failure + use<> {
        of_config(self.containerd.config.clone())
    }
}
