//! GRUB commands that affect the choice of the kernel.

use super::eval::{EntryAction, Interpreter, LinuxCommand, MAX_ENTRIES, MenuEntry, ScriptError};
use super::script::Block;
use super::{environment, test};
use crate::bls;
use crate::disk::FileRef;
use crate::error::shortened;

/// Work units of a command that accesses the disk.
const DISK_WORK: usize = 100;
/// Limits of the failed searches that an error names: their number, and the length of each in bytes.
const MAX_FAILED: usize = 8;
const MAX_TEXT: usize = 200;

impl Interpreter<'_> {
    /// Runs a GRUB command. Commands for graphics, modules and hardware do nothing.
    pub(super) fn command(
        &mut self,
        name: &str,
        args: &[String],
        block: Option<&Block>,
    ) -> Result<bool, ScriptError> {
        if looks_at_disk(name) {
            self.work(DISK_WORK)?;
        }
        match name {
            "set" => self.assign(args),
            name if args.is_empty() && is_assignment(name) => self.assign(&[name.to_owned()]),
            "unset" => {
                args.iter().for_each(|name| drop(self.variables.remove(name)));
                Ok(true)
            }
            "increment" | "decrement" => self.count(name == "increment", args),
            "[" => {
                let args = args.strip_suffix(&["]".to_owned()][..]).unwrap_or(args);
                Ok(test::test(args, self))
            }
            "test" => Ok(test::test(args, self)),
            "false" | "keystatus" | "regexp" | "cmostest" | "sleep" | "authenticate" => Ok(false),
            "menuentry" | "submenu" => self.entry(name == "submenu", args, block),
            "load_env" => self.load_env(args),
            "search" | "search.fs_uuid" | "search.fs_label" | "search.file" => self.search(name, args),
            "probe" => self.probe(args),
            "linux" | "linux16" | "linuxefi" | "kernel" => {
                self.linux_command = LinuxCommand {
                    kernel: args.first().and_then(|path| self.file_ref(path)),
                    linux: args.to_vec(),
                    initrds: Vec::new(),
                };
                Ok(true)
            }
            "initrd" | "initrd16" | "initrdefi" => {
                let paths = args.iter().filter(|a| !a.starts_with('-'));
                self.linux_command.initrds = paths.map(|path| (path.clone(), self.file_ref(path))).collect();
                Ok(true)
            }
            "source" | "." => match args.first().and_then(|path| self.file_ref(path)) {
                Some(file) => self.source(&file),
                None => Ok(false),
            },
            "configfile" | "extract_entries_configfile" | "normal" => {
                match args.first().and_then(|path| self.file_ref(path)) {
                    Some(file) if self.disk.is_file(&file) => {
                        // A configfile is a menu of its own; GRUB stays in it.
                        self.menu.clear();
                        self.configure(&file).map(|()| true)
                    }
                    Some(file) => {
                        self.note_failed(format!("{} on {}", file.path, self.disk.describe(file.volume)));
                        Ok(false)
                    }
                    None => Ok(false),
                }
            }
            "blscfg" => self.blscfg(args),
            _ => Ok(true),
        }
    }

    fn assign(&mut self, args: &[String]) -> Result<bool, ScriptError> {
        if let Some((name, value)) = args.first().and_then(|a| a.split_once('=')) {
            self.set(name, value.to_owned())?;
        }
        Ok(true)
    }

    fn count(&mut self, up: bool, args: &[String]) -> Result<bool, ScriptError> {
        let Some(name) = args.first() else {
            return Ok(false);
        };
        let value = self.get(name).parse::<i64>().unwrap_or(0);
        let value = if up {
            value.saturating_add(1)
        } else {
            value.saturating_sub(1)
        };
        self.set(name, value.to_string())?;
        Ok(true)
    }

    fn entry(&mut self, submenu: bool, args: &[String], block: Option<&Block>) -> Result<bool, ScriptError> {
        const WITH_VALUE: [&str; 4] = ["--class", "--users", "--hotkey", "--id"];
        let Some(block) = block.cloned() else {
            return Ok(false);
        };
        let (mut title, mut id) = (None, None);
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.split_once('=') {
                Some(("--id", value)) => id = Some(value.to_owned()),
                _ if arg == "--id" => id = args.next().cloned(),
                _ if WITH_VALUE.contains(&arg.as_str()) => drop(args.next()),
                _ if arg.starts_with("--") => {}
                _ if title.is_none() => title = Some(arg.clone()),
                _ => {}
            }
        }
        let title = title.unwrap_or_default();
        let action = if submenu {
            EntryAction::Submenu(block)
        } else {
            EntryAction::Script(block)
        };
        self.add(MenuEntry {
            id: id.unwrap_or_else(|| title.clone()),
            title,
            action,
        })
    }

    fn add(&mut self, entry: MenuEntry) -> Result<bool, ScriptError> {
        if self.menu.len() >= MAX_ENTRIES {
            return Err(ScriptError::Entries);
        }
        self.menu.push(entry);
        Ok(true)
    }

    fn load_env(&mut self, args: &[String]) -> Result<bool, ScriptError> {
        let (mut path, mut wanted) = (None, Vec::new());
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "-f" | "--file" => path = args.next().cloned(),
                other if other.starts_with("--file=") => path = Some(other["--file=".len()..].to_owned()),
                other if other.starts_with('-') => {}
                other => wanted.push(other),
            }
        }
        let path = path.unwrap_or_else(|| format!("{}/grubenv", self.get("prefix")));
        let text = self.file_ref(&path).and_then(|file| self.disk.text(&file).ok());
        let Some(text) = text else { return Ok(false) };
        for (name, value) in environment::parse(&text) {
            if wanted.is_empty() || wanted.contains(&name.as_str()) {
                self.set(&name, value)?;
            }
        }
        Ok(true)
    }

    fn search(&mut self, command: &str, args: &[String]) -> Result<bool, ScriptError> {
        let (mut by, mut variable) = (command.strip_prefix("search.").unwrap_or("file"), None);
        let dotted = command.contains('.');
        let (mut set, mut plain) = (None, Vec::new());
        let mut args = args.iter().peekable();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "-u" | "--fs-uuid" => by = "fs_uuid",
                "-l" | "--label" | "--fs-label" => by = "fs_label",
                "-f" | "--file" => by = "file",
                "-s" | "--set" => {
                    let next = args.next_if(|next| next.len() < 2 || !next.starts_with('-'));
                    set = next.map(String::as_str);
                    variable = set.or(Some("root"));
                }
                "-h" | "--hint" => drop(args.next()),
                other if other.starts_with("--set=") => {
                    set = Some(&other["--set=".len()..]);
                    variable = set;
                }
                other if other.starts_with("--hint-") && !other.contains('=') => drop(args.next()),
                other if other.starts_with('-') => {}
                other => plain.push(other),
            }
        }
        if dotted {
            variable = plain.get(1).copied();
        }
        // As GRUB: if `--set` has taken the only name, that is what to look for.
        let wanted = match (plain.first(), set) {
            (Some(wanted), _) => *wanted,
            (None, Some(only)) => {
                variable = Some("root");
                only
            }
            (None, None) => return Ok(false),
        };
        let found = match by {
            "fs_uuid" => self.disk.by_uuid(wanted),
            "fs_label" => self.disk.by_label(wanted),
            _ => self.disk.by_file(wanted),
        };
        match found {
            Some(volume) => {
                if let Some(variable) = variable {
                    self.set(variable, self.disk.device(volume))?;
                }
                Ok(true)
            }
            None => {
                self.note_failed(format!(
                    "a filesystem with {} {wanted}",
                    by.trim_start_matches("fs_")
                ));
                Ok(false)
            }
        }
    }

    /// Keeps what was looked for in vain, for a message. A script may look for any number of things.
    fn note_failed(&mut self, what: String) {
        if self.failed_searches.len() < MAX_FAILED {
            self.failed_searches.push(shortened(what, MAX_TEXT));
        }
    }

    fn probe(&mut self, args: &[String]) -> Result<bool, ScriptError> {
        let variable = args
            .iter()
            .find_map(|a| a.strip_prefix("--set="))
            .map(str::to_owned);
        let device = args.iter().find(|a| !a.starts_with('-'));
        let volume = device
            .and_then(|d| self.disk.by_device(d))
            .and_then(|i| self.disk.volume(i));
        let wants = |short: &str, long: &str| args.iter().any(|a| a == short || a == long);
        let value = match volume {
            Some(v) if wants("-u", "--fs-uuid") => v.uuid().to_owned(),
            Some(v) if wants("-l", "--label") => v.label().to_owned(),
            _ => return Ok(false),
        };
        if let Some(name) = variable {
            self.set(&name, value)?;
        }
        Ok(true)
    }

    /// Adds the entries of `$blsdir` or the usual directories on `$boot` or `$root`, as Fedora's GRUB does.
    fn blscfg(&mut self, args: &[String]) -> Result<bool, ScriptError> {
        let volume = self
            .disk
            .by_device(self.get("boot"))
            .unwrap_or_else(|| self.root());
        let usual = ["/loader/entries", "/boot/loader/entries"].map(|path| FileRef {
            volume,
            path: path.to_owned(),
        });
        let given = args.iter().map(String::as_str).chain([self.get("blsdir")]);
        let given = given.filter_map(|path| self.file_ref(path));
        let found = given
            .chain(usual)
            .map(|dir| (bls::entries(self.disk, &dir), dir.volume));
        let Some((mut entries, volume)) = found.into_iter().find(|(entries, _)| !entries.is_empty()) else {
            self.note_failed(format!(
                "entries in /loader/entries on {}",
                self.disk.describe(volume)
            ));
            return Ok(false);
        };
        bls::newest_first(&mut entries);
        for entry in entries {
            let (title, id) = (entry.name().to_owned(), entry.id.clone());
            self.add(MenuEntry {
                title,
                id,
                action: EntryAction::Bls(Box::new(entry), volume),
            })?;
        }
        Ok(true)
    }
}

fn looks_at_disk(command: &str) -> bool {
    let prefixes = [
        "[",
        "test",
        "search",
        "load_env",
        "source",
        ".",
        "configfile",
        "blscfg",
        "normal",
        "initrd",
    ];
    prefixes.iter().any(|p| command.starts_with(p))
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}
