//! GRUB configurations: finds the default entry and its kernel.

mod commands;
mod environment;
mod eval;
mod script;
mod test;

use crate::bls;
use crate::disk::{FileRef, PartitionedDisk};
use crate::selected_entry::{SelectedEntry, find_file};
use eval::{EntryAction, Interpreter, MenuEntry};

/// Maximum nesting of submenus.
const MAX_SUBMENUS: usize = 8;

/// Runs the configuration at `file` and returns its default entry, or an error text.
pub(crate) fn select_entry(disk: &PartitionedDisk, file: &FileRef) -> Result<SelectedEntry, String> {
    let mut grub = Interpreter::new(disk, file.clone());
    grub.run_file().map_err(|e| e.to_string())?;
    let (title, bls) = choose(&mut grub)?;
    let config = grub.file.clone();
    let what = match &title {
        Some(title) => format!("entry '{title}'"),
        None => "its commands".to_owned(),
    };
    let source = format!("{}, {}, {what}", disk.describe(config.volume), config.path);
    let named = |why: String| format!("{what}: {why}");
    let mut plan = match bls {
        Some((entry, volume)) => select_bls_entry(disk, &mut grub, &entry, volume).map_err(named)?,
        None => select_loaded(disk, &grub).map_err(named)?,
    };
    plan.title = title.unwrap_or_default();
    plan.source = source;
    Ok(plan)
}

/// An entry of Boot Loader Specification files.
type BlsChoice = (bls::Entry, usize);

/// Runs the default entry, through submenus; gives its title, none if the script itself loaded a kernel.
fn choose(grub: &mut Interpreter<'_>) -> Result<(Option<String>, Option<BlsChoice>), String> {
    let mut default = grub.get("default").to_owned();
    let mut titles: Vec<String> = Vec::new();
    for _ in 0..MAX_SUBMENUS {
        let menu = std::mem::take(&mut grub.menu);
        if menu.is_empty() {
            if titles.is_empty() && grub.linux_command.kernel.is_some() {
                return Ok((None, None));
            }
            return Err(match grub.failed_searches.is_empty() {
                true => "it has no menu entries".to_owned(),
                false => format!(
                    "it has no menu entries; it looked for {}",
                    grub.failed_searches.join(", ")
                ),
            });
        }
        let (first, rest) = split(&default);
        // As GRUB: an entry that is not there means the first one.
        let Some(entry) = find(&menu, &first).or(menu.first()) else {
            break;
        };
        titles.push(entry.title.clone());
        match &entry.action {
            EntryAction::Script(block) => {
                grub.run(block).map_err(|e| e.to_string())?;
                return Ok((titles.pop(), None));
            }
            EntryAction::Bls(entry, volume) => return Ok((titles.pop(), Some(((**entry).clone(), *volume)))),
            EntryAction::Submenu(block) => {
                grub.run(block).map_err(|e| e.to_string())?;
                default = rest;
            }
        }
    }
    Err(format!("its submenus are nested deeper than {MAX_SUBMENUS}"))
}

/// Splits `default` at the first single `>`; two of them stand for one in a title.
fn split(default: &str) -> (String, String) {
    let mut first = String::new();
    let mut chars = default.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '>' && chars.next_if_eq(&'>').is_none() {
            return (first, chars.collect());
        }
        first.push(c);
    }
    (first, String::new())
}

/// An entry by number, id or title.
fn find<'a>(menu: &'a [MenuEntry], wanted: &str) -> Option<&'a MenuEntry> {
    match wanted.parse::<usize>() {
        Ok(index) => menu.get(index),
        Err(_) => menu.iter().find(|e| e.id == wanted || e.title == wanted),
    }
}

fn select_loaded(disk: &PartitionedDisk, grub: &Interpreter<'_>) -> Result<SelectedEntry, String> {
    let Some((path, args)) = grub.linux_command.linux.split_first() else {
        return Err("it loads no Linux kernel".to_owned());
    };
    let hint = || match grub.failed_searches.last() {
        Some(search) => format!("; the configuration also looked for {search}, which is not there"),
        None => String::new(),
    };
    let kernel = grub
        .linux_command
        .kernel
        .clone()
        .ok_or_else(|| format!("kernel {path}: no such path{}", hint()))?;
    let kernel = find_file(disk, &kernel, "kernel").map_err(|e| e + &hint())?;
    let initrds = grub.linux_command.initrds.iter().map(|(path, file)| match file {
        Some(file) => find_file(disk, file, "initrd"),
        None => Err(format!("initrd {path}: no such path")),
    });
    Ok(SelectedEntry {
        command_line: command_line(path, args),
        kernel,
        initrds: initrds.collect::<Result<_, _>>()?,
        ..SelectedEntry::default()
    })
}

fn select_bls_entry(
    disk: &PartitionedDisk,
    grub: &mut Interpreter<'_>,
    entry: &bls::Entry,
    volume: usize,
) -> Result<SelectedEntry, String> {
    let options = grub.substitute(&entry.options).map_err(|e| e.to_string())?;
    let mut files = Vec::new();
    for initrd in &entry.initrds {
        for path in grub.substitute(initrd).map_err(|e| e.to_string())? {
            files.push(bls_file(disk, volume, &path, "initrd")?);
        }
    }
    Ok(SelectedEntry {
        command_line: format!(
            "BOOT_IMAGE=({}){} {}",
            disk.device(volume),
            entry.linux,
            options.join(" ")
        )
        .trim_end()
        .to_owned(),
        kernel: bls_file(disk, volume, &entry.linux, "kernel")?,
        initrds: files,
        ..SelectedEntry::default()
    })
}

/// Finds a file of a BLS entry.
pub(crate) fn bls_file(
    disk: &PartitionedDisk,
    volume: usize,
    path: &str,
    what: &str,
) -> Result<FileRef, String> {
    let file = bls_path(disk, volume, path).ok_or_else(|| format!("{what}: no such path"))?;
    find_file(disk, &file, what)
}

/// Path of a file of a BLS entry: on its filesystem, or below /boot if that is not a separate filesystem.
pub(crate) fn bls_path(disk: &PartitionedDisk, volume: usize, path: &str) -> Option<FileRef> {
    let path = crate::volume::normalise(path)?;
    let direct = FileRef { volume, path };
    let below = FileRef {
        volume,
        path: format!("/boot{}", direct.path),
    };
    match disk.is_file(&direct) || !disk.is_file(&below) {
        true => Some(direct),
        false => Some(below),
    }
}

/// The command line as GRUB builds it: BOOT_IMAGE, then the arguments, with quotes around words that the kernel would
/// split.
fn command_line(path: &str, args: &[String]) -> String {
    let mut line = format!("BOOT_IMAGE={path}");
    for arg in args {
        line.push(' ');
        let quote = arg.contains(' ');
        if quote {
            line.push('"');
        }
        for (at, c) in arg.char_indices() {
            if matches!(c, '\\' | '\'' | '"') && !is_hex_escape(&arg[at..]) {
                line.push('\\');
            }
            line.push(c);
        }
        if quote {
            line.push('"');
        }
    }
    line
}

/// True if `text` starts with `\xHH`, which GRUB copies as it is.
fn is_hex_escape(text: &str) -> bool {
    let digits = text.strip_prefix("\\x").and_then(|rest| rest.as_bytes().get(..2));
    digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
}
