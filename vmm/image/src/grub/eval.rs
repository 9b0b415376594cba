//! Runs a GRUB script as far as it affects the choice of the kernel: variables, conditions, menu entries, kernels and
//! initrds.
//!
//! Commands for graphics, modules and hardware do nothing and succeed. Everything is bounded: steps,
//! nesting, files sourced, variables, and the length of what words expand to.

use std::collections::BTreeMap;
use std::rc::Rc;

use thiserror::Error;

use super::script::{self, Block, Command, Segment, Word};
use super::test;
use crate::bls;
use crate::disk::{FileRef, PartitionedDisk};
use crate::volume::normalise;

/// Maximum work of all scripts: two bytes read count one, a word expanded another, 64 bytes of it another, a command
/// that looks at the disk 100.
const MAX_WORK: usize = 1_000_000;
/// Maximum nesting of functions and files.
const MAX_DEPTH: usize = 16;
/// Maximum number of files sourced.
const MAX_FILES: usize = 32;
/// Maximum number of menu entries.
pub(super) const MAX_ENTRIES: usize = 1024;
/// Maximum bytes that the words of a command expand to, and that a variable holds.
const MAX_EXPANSION: usize = 64 << 10;
/// Maximum number of variables and of functions.
const MAX_VARIABLES: usize = 1024;

/// Error of running a script.
#[derive(Debug, Error)]
pub(crate) enum ScriptError {
    #[error("{0}: {1}")]
    Syntax(String, script::SyntaxError),
    #[error("the script exceeds the work limit")]
    Work,
    #[error("functions or files are nested deeper than {MAX_DEPTH}")]
    Depth,
    #[error("the script reads more than {MAX_FILES} files")]
    Files,
    #[error("the script has more than {MAX_ENTRIES} menu entries")]
    Entries,
    #[error("a command or variable is longer than {MAX_EXPANSION} bytes, or there are too many")]
    Length,
}

/// An entry of the menu.
#[derive(Clone, Debug)]
pub(crate) struct MenuEntry {
    pub title: String,
    pub id: String,
    /// Commands to run; those of a submenu add entries.
    pub action: EntryAction,
}

/// Action of a menu entry.
#[derive(Clone, Debug)]
pub(crate) enum EntryAction {
    Script(Block),
    Submenu(Block),
    /// From a BLS file, on the volume it names.
    Bls(Box<bls::Entry>, usize),
}

/// Arguments of the last `linux` and `initrd` commands.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinuxCommand {
    /// Arguments of `linux`: path, then command line.
    pub linux: Vec<String>,
    /// The volume that was root when `linux` ran.
    pub kernel: Option<FileRef>,
    /// Arguments of `initrd`, and the files that they resolved to.
    pub initrds: Vec<(String, Option<FileRef>)>,
}

/// The state of a running script.
pub(crate) struct Interpreter<'a> {
    pub(super) disk: &'a PartitionedDisk,
    pub(super) variables: BTreeMap<String, String>,
    functions: BTreeMap<String, Block>,
    /// Positional parameters of the function running.
    parameters: Vec<String>,
    work: usize,
    depth: usize,
    files: usize,
    /// Root of the volume the first script lies on, where `$root` names none.
    initial_volume: usize,
    /// Entries of the menu being built.
    pub menu: Vec<MenuEntry>,
    /// Arguments of the last `linux` and `initrd` commands.
    pub linux_command: LinuxCommand,
    /// The configuration file read last by `configfile`, or the first one.
    pub file: FileRef,
    /// Searches without a result, for the error text.
    pub failed_searches: Vec<String>,
}

impl<'a> Interpreter<'a> {
    /// An interpreter that has `file` as its configuration, as GRUB has after its core started.
    pub(crate) fn new(disk: &'a PartitionedDisk, file: FileRef) -> Self {
        let mut interpreter = Self {
            disk,
            variables: BTreeMap::new(),
            functions: BTreeMap::new(),
            parameters: Vec::new(),
            work: 0,
            depth: 0,
            files: 0,
            initial_volume: file.volume,
            menu: Vec::new(),
            linux_command: LinuxCommand::default(),
            file,
            failed_searches: Vec::new(),
        };
        let device = disk.device(interpreter.initial_volume);
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
        self.disk
            .by_device(self.get("root"))
            .unwrap_or(self.initial_volume)
    }

    /// Runs commands; returns the result of the last one.
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

    /// Counts work done, up to the limit.
    pub(super) fn work(&mut self, units: usize) -> Result<(), ScriptError> {
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

    /// Expands the words and calls the function or command they name.
    fn simple(&mut self, words: &[Word], block: Option<&Block>) -> Result<bool, ScriptError> {
        let words = self.expand(words)?;
        let negations = words.iter().take_while(|word| *word == "!").count();
        let negate = negations % 2 == 1;
        let Some((name, args)) = words[negations..].split_first() else {
            return Ok(negations == 0);
        };
        let value = self.call(name, args, block)?;
        Ok(value != negate)
    }

    /// Calls a function or command.
    fn call(&mut self, name: &str, args: &[String], block: Option<&Block>) -> Result<bool, ScriptError> {
        let Some(body) = self.functions.get(name).cloned() else {
            return self.command(name, args, block);
        };
        let outer = std::mem::replace(&mut self.parameters, args.to_vec());
        let result = self.nested(|s| s.run(&body));
        self.parameters = outer;
        result
    }

    /// Makes `file` the configuration and runs it.
    pub(super) fn configure(&mut self, file: &FileRef) -> Result<(), ScriptError> {
        let device = self.disk.device(file.volume);
        self.set("config_directory", format!("({device}){}", parent(&file.path)))?;
        self.set("config_file", format!("({device}){}", file.path))?;
        self.file = file.clone();
        self.source(file).map(drop)
    }

    /// Runs a file in place. A missing file, such as custom.cfg, is not an error.
    pub(super) fn source(&mut self, file: &FileRef) -> Result<bool, ScriptError> {
        self.files += 1;
        if self.files > MAX_FILES {
            return Err(ScriptError::Files);
        }
        let Ok(text) = self.disk.text(file) else {
            return Ok(false);
        };
        // A function keeps its body, which takes many times its text.
        self.work(text.len() / 2)?;
        let block = script::parse(&text).map_err(|e| ScriptError::Syntax(file.path.clone(), e))?;
        self.nested(|s| s.run(&block))
    }

    /// Replaces `$name` and `${name}` in a BLS value.
    pub(crate) fn substitute(&mut self, text: &str) -> Result<Vec<String>, ScriptError> {
        // A BLS value is no script: quotes and semicolons in it are text, and stay where they are.
        let words: Vec<Word> = text.split_whitespace().map(script::variables).collect();
        self.expand(&words)
    }
}

impl test::FileTests for Interpreter<'_> {
    fn size(&self, path: &str) -> Option<u64> {
        self.disk.size(&self.file_ref(path)?).ok()
    }

    fn is_dir(&self, path: &str) -> bool {
        let file = self.file_ref(path);
        file.and_then(|f| self.disk.volume(f.volume)?.list(&f.path).ok())
            .is_some()
    }
}

/// The directory a path is in, without a slash at its end; empty for the root directory.
fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}
