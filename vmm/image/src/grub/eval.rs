//! Runs a GRUB script as far as it decides what boots: variables, conditions, menu entries, kernels and initrds.
//!
//! Commands that draw, load modules or talk to hardware do nothing and succeed. Everything is bounded: steps,
//! nesting, files sourced, variables, and the length of what words expand to.

use std::collections::BTreeMap;
use std::rc::Rc;

use thiserror::Error;

use super::script::{self, Block, Command, Segment, Word};
use super::{environment, test};
use crate::bls;
use crate::disk::{Disk, FileRef};
use crate::volume::normalise;

/// Work done in all: a word expanded counts one, 64 bytes of it another, a command that looks at the disk 100.
const MAX_WORK: usize = 1_000_000;
/// What looking at the disk counts.
const DISK_WORK: usize = 100;
/// Functions and files within each other.
const MAX_DEPTH: usize = 16;
/// Files sourced in all.
const MAX_FILES: usize = 32;
/// Menu entries kept.
const MAX_ENTRIES: usize = 1024;
/// Bytes one command's words expand to, and one variable holds.
const MAX_EXPANSION: usize = 64 << 10;
/// Variables and functions kept.
const MAX_VARIABLES: usize = 1024;

/// Why a script did not run to its end.
#[derive(Debug, Error)]
pub(crate) enum ScriptError {
    #[error("{0}: {1}")]
    Syntax(String, script::SyntaxError),
    #[error("it does more than a boot configuration would")]
    Work,
    #[error("functions or files are nested deeper than {MAX_DEPTH}")]
    Depth,
    #[error("it reads more than {MAX_FILES} files")]
    Files,
    #[error("it has more than {MAX_ENTRIES} menu entries")]
    Entries,
    #[error("a command or variable is longer than {MAX_EXPANSION} bytes, or there are too many")]
    Length,
}

/// An entry of the menu.
#[derive(Clone, Debug)]
pub(crate) struct MenuEntry {
    pub title: String,
    pub id: String,
    /// What it runs; a submenu's block adds entries.
    pub body: Body,
}

/// What choosing an entry does.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    Script(Block),
    Submenu(Block),
    /// From a BLS file, on the volume it names.
    Bls(Box<bls::Entry>, usize),
}

/// A kernel and initrds as the script names them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Loaded {
    /// Arguments of `linux`: path, then command line.
    pub linux: Vec<String>,
    /// The volume that was root when `linux` ran.
    pub kernel: Option<FileRef>,
    pub initrds: Vec<FileRef>,
}

/// The state of a running script.
pub(crate) struct Interpreter<'a> {
    disk: &'a Disk,
    variables: BTreeMap<String, String>,
    functions: BTreeMap<String, Block>,
    /// Positional parameters of the function running.
    parameters: Vec<String>,
    work: usize,
    depth: usize,
    files: usize,
    /// Root of the volume the first script lies on, where `$root` names none.
    home: usize,
    /// Entries of the menu being built.
    pub menu: Vec<MenuEntry>,
    /// What `linux` and `initrd` loaded last.
    pub loaded: Loaded,
    /// The configuration file read last by `configfile`, or the first one.
    pub file: FileRef,
    /// Searches that found nothing, for the error text.
    pub missed: Vec<String>,
}

impl<'a> Interpreter<'a> {
    /// An interpreter that has `file` as its configuration, as GRUB has after its core started.
    pub(crate) fn new(disk: &'a Disk, file: FileRef) -> Self {
        let mut interpreter = Self {
            disk,
            variables: BTreeMap::new(),
            functions: BTreeMap::new(),
            parameters: Vec::new(),
            work: 0,
            depth: 0,
            files: 0,
            home: file.volume,
            menu: Vec::new(),
            loaded: Loaded::default(),
            file,
            missed: Vec::new(),
        };
        let device = disk.device(interpreter.home);
        let directory = parent(&interpreter.file.path).to_owned();
        for (name, value) in [
            ("root", device.clone()),
            ("prefix", format!("({device}){directory}")),
            ("grub_cpu", "x86_64".to_owned()),
            ("grub_platform", "pc".to_owned()),
            ("feature_menuentry_id", "y".to_owned()),
            ("feature_menuentry_options", "y".to_owned()),
            ("feature_timeout_style", "y".to_owned()),
            ("feature_default_font_path", "y".to_owned()),
            ("feature_platform_search_hint", "y".to_owned()),
            ("feature_all_video_module", "y".to_owned()),
            ("feature_ntldr", "y".to_owned()),
            ("feature_200_final", "y".to_owned()),
        ] {
            interpreter.variables.insert(name.to_owned(), value);
        }
        interpreter
    }

    /// Runs the configuration file.
    pub(crate) fn run_file(&mut self) -> Result<(), ScriptError> {
        let file = self.file.clone();
        self.configure(&file)
    }

    /// Value of a variable, empty if it is not set.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.variables.get(name).map_or("", String::as_str)
    }

    /// Sets a variable.
    pub(crate) fn set(&mut self, name: &str, value: String) -> Result<(), ScriptError> {
        let full = self.variables.len() >= MAX_VARIABLES && !self.variables.contains_key(name);
        if full || name.len() > MAX_EXPANSION || value.len() > MAX_EXPANSION {
            return Err(ScriptError::Length);
        }
        self.variables.insert(name.to_owned(), value);
        Ok(())
    }

    /// Resolves `(device)/path` or `/path` on `$root`.
    pub(crate) fn file_ref(&self, path: &str) -> Option<FileRef> {
        let (volume, path) = match path.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((device, path)) => (self.disk.by_device(device)?, path),
            None => (self.root(), path),
        };
        path.starts_with('/')
            .then(|| normalise(path))
            .flatten()
            .map(|path| FileRef { volume, path })
    }

    /// The volume `$root` names.
    pub(crate) fn root(&self) -> usize {
        self.disk.by_device(self.get("root")).unwrap_or(self.home)
    }

    /// Runs commands; the value is that of the last one.
    pub(crate) fn run(&mut self, block: &Block) -> Result<bool, ScriptError> {
        let mut value = true;
        for command in block.iter() {
            self.work(1)?;
            value = match command {
                Command::Simple { words, block } => self.simple(words, block.as_ref())?,
                Command::If { branches, otherwise } => {
                    let mut chosen = otherwise;
                    for (condition, body) in branches {
                        if self.run(condition)? {
                            chosen = body;
                            break;
                        }
                    }
                    self.run(chosen)?
                }
                Command::For { name, words, body } => {
                    for word in self.expand(words)? {
                        self.set(name, word)?;
                        self.run(body)?;
                    }
                    true
                }
                Command::Function { name, body } => {
                    if self.functions.len() >= MAX_VARIABLES {
                        return Err(ScriptError::Length);
                    }
                    self.functions.insert(name.clone(), Rc::clone(body));
                    true
                }
                Command::Loop => true,
            };
        }
        Ok(value)
    }

    fn work(&mut self, units: usize) -> Result<(), ScriptError> {
        self.work += units;
        if self.work > MAX_WORK {
            Err(ScriptError::Work)
        } else {
            Ok(())
        }
    }

    /// Runs `f` one level deeper.
    fn nested<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, ScriptError>) -> Result<T, ScriptError> {
        if self.depth >= MAX_DEPTH {
            return Err(ScriptError::Depth);
        }
        self.depth += 1;
        let result = f(self);
        self.depth -= 1;
        result
    }

    fn expand(&mut self, words: &[Word]) -> Result<Vec<String>, ScriptError> {
        let mut out: Vec<String> = Vec::new();
        let mut size = 0;
        for word in words {
            // A word that is only unquoted variables may become none or several.
            let mut current: Option<String> = None;
            for segment in word {
                let (value, split) = match segment {
                    Segment::Text { text, .. } => (text.clone(), false),
                    Segment::Variable { name, quoted } => (self.lookup(name), !quoted),
                };
                size += value.len() + 1;
                if size > MAX_EXPANSION {
                    return Err(ScriptError::Length);
                }
                if !split {
                    current.get_or_insert_default().push_str(&value);
                    continue;
                }
                if value.starts_with(char::is_whitespace) {
                    out.extend(current.take());
                }
                for (i, part) in value.split_whitespace().enumerate() {
                    if i > 0 {
                        out.extend(current.take());
                    }
                    current.get_or_insert_default().push_str(part);
                }
                if value.ends_with(char::is_whitespace) {
                    out.extend(current.take());
                }
            }
            out.extend(current);
        }
        self.work(out.len() + size / 64)?;
        Ok(out)
    }

    fn lookup(&self, name: &str) -> String {
        match name {
            "*" | "@" => self.parameters.join(" "),
            "#" => self.parameters.len().to_string(),
            "?" => "0".to_owned(),
            name => match name.parse::<usize>() {
                Ok(n) => n
                    .checked_sub(1)
                    .and_then(|i| self.parameters.get(i))
                    .cloned()
                    .unwrap_or_default(),
                Err(_) => self.get(name).to_owned(),
            },
        }
    }

    fn simple(&mut self, words: &[Word], block: Option<&Block>) -> Result<bool, ScriptError> {
        let words = self.expand(words)?;
        let Some((name, args)) = words.split_first() else {
            return Ok(true);
        };
        if let Some(body) = self.functions.get(name).cloned() {
            let outer = std::mem::replace(&mut self.parameters, args.to_vec());
            let result = self.nested(|s| s.run(&body));
            self.parameters = outer;
            return result;
        }
        if looks_at_disk(name) {
            self.work(DISK_WORK)?;
        }
        match name.as_str() {
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
                self.loaded = Loaded {
                    kernel: args.first().and_then(|path| self.file_ref(path)),
                    linux: args.to_vec(),
                    initrds: Vec::new(),
                };
                Ok(true)
            }
            "initrd" | "initrd16" | "initrdefi" => {
                let paths = args.iter().filter(|a| !a.starts_with('-'));
                // GRUB's newc:NAME:PATH wraps single files; nothing that boots from a disk image writes it.
                let files = paths.filter_map(|path| self.file_ref(path)).collect();
                self.loaded.initrds = files;
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
                        self.missed
                            .push(format!("{} on {}", file.path, self.disk.describe(file.volume)));
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
        let body = if submenu {
            Body::Submenu(block)
        } else {
            Body::Script(block)
        };
        self.add(MenuEntry {
            id: id.unwrap_or_else(|| title.clone()),
            title,
            body,
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
        let mut plain = Vec::new();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "-u" | "--fs-uuid" => by = "fs_uuid",
                "-l" | "--label" | "--fs-label" => by = "fs_label",
                "-f" | "--file" => by = "file",
                "-s" | "--set" => variable = Some("root".to_owned()),
                "-h" | "--hint" => drop(args.next()),
                other if other.starts_with("--set=") => variable = Some(other["--set=".len()..].to_owned()),
                other if other.starts_with('-') => {}
                other => plain.push(other),
            }
        }
        let Some(wanted) = plain.first() else {
            return Ok(false);
        };
        // `search.fs_uuid UUID root`, but also `search --set root …` as old configurations have it.
        if dotted {
            variable = plain.get(1).map(|v| (*v).to_owned());
        }
        let found = match by {
            "fs_uuid" => self.disk.by_uuid(wanted),
            "fs_label" => self.disk.by_label(wanted),
            _ => self.disk.by_file(wanted),
        };
        match found {
            Some(volume) => {
                let device = self.disk.device(volume);
                self.set(variable.as_deref().unwrap_or("root"), device)?;
                Ok(true)
            }
            None => {
                self.missed.push(format!(
                    "a filesystem with {} {wanted}",
                    by.trim_start_matches("fs_")
                ));
                Ok(false)
            }
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

    /// Makes `file` the configuration and runs it.
    fn configure(&mut self, file: &FileRef) -> Result<(), ScriptError> {
        let device = self.disk.device(file.volume);
        self.set("config_directory", format!("({device}){}", parent(&file.path)))?;
        self.set("config_file", format!("({device}){}", file.path))?;
        self.file = file.clone();
        self.source(file).map(drop)
    }

    /// Runs a file in place. One that is not there, such as custom.cfg, is not an error.
    fn source(&mut self, file: &FileRef) -> Result<bool, ScriptError> {
        self.files += 1;
        if self.files > MAX_FILES {
            return Err(ScriptError::Files);
        }
        let Ok(text) = self.disk.text(file) else {
            return Ok(false);
        };
        let block = script::parse(&text).map_err(|e| ScriptError::Syntax(file.path.clone(), e))?;
        self.nested(|s| s.run(&block))
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
            self.missed.push(format!(
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
                body: Body::Bls(Box::new(entry), volume),
            })?;
        }
        Ok(true)
    }

    /// Replaces `$name` and `${name}` in a BLS value.
    pub(crate) fn substitute(&mut self, text: &str) -> Result<Vec<String>, ScriptError> {
        // A BLS value is no script: quotes and semicolons in it are text, and stay where they are.
        let words: Vec<Word> = text.split_whitespace().map(script::variables).collect();
        self.expand(&words)
    }
}

impl test::Files for Interpreter<'_> {
    fn size(&self, path: &str) -> Option<u64> {
        self.disk.size(&self.file_ref(path)?).ok()
    }

    fn is_dir(&self, path: &str) -> bool {
        let file = self.file_ref(path);
        file.and_then(|f| self.disk.volume(f.volume)?.list(&f.path).ok())
            .is_some()
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

/// The directory a path is in, without a slash at its end; empty for the root directory.
fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}
