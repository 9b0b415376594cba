//! A systemd for unit tests: it answers `systemctl` and `systemd-run` in the thread of the test.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use super::systemd::Systemd;
use crate::failure::Failure;

/// Commands after which a test fails: the code under test waits for something that does not happen.
const MAX_COMMANDS: usize = 100;

thread_local! {
    static FAKE: RefCell<Option<FakeSystemd>> = const { RefCell::new(None) };
}

/// The units that systemd has, and what it was asked for.
#[derive(Debug, Default)]
pub(crate) struct FakeSystemd {
    /// `ActiveState` by the name of the unit.
    pub units: BTreeMap<String, &'static str>,
    /// `StatusText` of the units.
    pub text: &'static str,
    /// Units end at once when they are stopped.
    pub ends: bool,
    /// Units are enabled, also when they were disabled, as if another command enabled them.
    pub stay_enabled: bool,
    /// It fails for units that it does not have, as without the unit file `husk@.service`.
    pub lacks_unit_file: bool,
    /// A program that fails.
    pub fails: Option<&'static str>,
    pub commands: Vec<String>,
    /// Directory of the unit file, if the code under test writes it.
    pub unit_directory: Option<PathBuf>,
}

impl FakeSystemd {
    /// Answers this thread from now on.
    pub(crate) fn install(self) -> Systemd {
        FAKE.set(Some(self));
        Systemd::of_machine()
    }

    /// The commands that change something, without their options.
    pub(crate) fn changes() -> Vec<String> {
        let commands = FAKE.with_borrow(|fake| fake.as_ref().map(|fake| fake.commands.clone()));
        let mut changes = commands.unwrap_or_default();
        changes.retain(|command| {
            !["show", "reset-failed"].contains(&command.split(' ').next().unwrap_or_default())
        });
        changes
    }
}

/// True if a test has installed a [`FakeSystemd`] in this thread.
pub(super) fn is_installed() -> bool {
    FAKE.with_borrow(Option::is_some)
}

/// Directory of the unit file; none if no test has installed a [`FakeSystemd`] in this thread.
pub(super) fn unit_directory() -> Option<PathBuf> {
    FAKE.with_borrow(|fake| {
        let directory = fake.as_ref()?.unit_directory.clone();
        // No test writes to the directory of the machine.
        Some(directory.unwrap_or_else(|| "/dev/null".into()))
    })
}

/// The answer to a command; none if no test has installed a [`FakeSystemd`] in this thread.
pub(super) fn answer(command: &Command) -> Option<Result<String, Failure>> {
    FAKE.with_borrow_mut(|fake| {
        let fake = fake.as_mut()?;
        let program = command.get_program().to_string_lossy();
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        let words: Vec<&str> = words
            .iter()
            .map(AsRef::as_ref)
            .filter(|word| !word.starts_with('-'))
            .collect();
        fake.commands.push(words.join(" "));
        assert!(fake.commands.len() < MAX_COMMANDS, "{:?}", fake.commands);
        if fake.fails == Some(&*program) {
            return Some(Err(Failure::Runtime(format!("{program}: refused"))));
        }
        if fake.lacks_unit_file
            && let [verb, unit] = words[..]
            && !fake.units.contains_key(unit)
        {
            return Some(match verb {
                "show" => Ok(format!(
                    "Id={unit}\nLoadState=not-found\nActiveState=inactive\n\n"
                )),
                _ => Err(Failure::Runtime(format!("Unit {unit} does not exist."))),
            });
        }
        if fake.ends
            && let ["stop", unit] = words[..]
        {
            fake.units.insert(unit.to_owned(), "inactive");
        }
        let mut text = String::new();
        let shown = fake
            .units
            .iter()
            .filter(|(unit, _)| words.iter().any(|word| fits(unit, word)));
        for (unit, state) in shown {
            let file = if fake.stay_enabled { "enabled" } else { "" };
            let _ = write!(
                text,
                "Id={unit}\nActiveState={state}\nStatusText={}\nUnitFileState={file}\n\n",
                fake.text
            );
        }
        Some(Ok(text))
    })
}

/// True if a unit has this name, or one of this pattern with one `*`.
fn fits(unit: &str, word: &str) -> bool {
    match word.split_once('*') {
        Some((begin, end)) => unit.starts_with(begin) && unit.ends_with(end),
        None => unit == word,
    }
}
