//! Feeds scripts of GRUB's words and of any bytes, with an environment, to the search for a kernel on a FAT filesystem.
//! Asserts that the command line is one line, and that the kernel is a file of the disk.

#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::images::{Patched, Seed, fat, read, search};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    config: Vec<Piece<'a>>,
    custom: Vec<Piece<'a>>,
    environment: Vec<Variable<'a>>,
    entry: Vec<Piece<'a>>,
}

#[derive(Arbitrary, Debug)]
enum Piece<'a> {
    Word(u8),
    /// A word, and a blank or a line break behind it.
    Blank(u8),
    Line(u8),
    Text(&'a [u8]),
}

#[derive(Arbitrary, Debug)]
struct Variable<'a> {
    name: u8,
    value: &'a [u8],
}

const NAMES: [&[u8]; 8] = [
    b"saved_entry",
    b"next_entry",
    b"default",
    b"root",
    b"prefix",
    b"kernelopts",
    b"x",
    b"boot",
];

const WORDS: [&str; 96] = [
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "for",
    "in",
    "do",
    "done",
    "while",
    "until",
    "function",
    "f",
    "{",
    "}",
    "\n",
    ";",
    "[",
    "]",
    "!",
    "-a",
    "-o",
    "-f",
    "-s",
    "-d",
    "-e",
    "-n",
    "-z",
    "(",
    ")",
    "=",
    "!=",
    "-lt",
    "<",
    "menuentry",
    "submenu",
    "'t'",
    "--id",
    "--class",
    "set",
    "unset",
    "x=$x$x$x",
    "x=1",
    "$x",
    "${x}",
    "$1",
    "$@",
    "$#",
    "$?",
    "\"",
    "'",
    "$",
    "\\",
    "#",
    "linux",
    "linux16",
    "/k",
    "initrd",
    "/i",
    "source",
    "configfile",
    "normal",
    "/boot/grub/grub.cfg",
    "/boot/grub/custom.cfg",
    "$config_file",
    "$prefix",
    "$config_directory/custom.cfg",
    "blscfg",
    "/loader/entries",
    "blsdir=/loader/entries",
    "load_env",
    "--file",
    "/boot/grub/grubenv",
    "search",
    "--set=root",
    "--file",
    "--fs-uuid",
    "--label",
    "search.fs_uuid",
    "ABCD-1234",
    "root",
    "probe",
    "--set=x",
    "hd0",
    "default=0>0",
    "default=1>t",
    "default=$saved_entry",
    "root=hd0,gpt99",
    "(hd0)/k",
    "(hd0,1)/k",
    "increment",
    "decrement",
    "true",
    "false",
    "export",
    "test",
];

const KERNEL: [u8; 600] = [7; 600];
/// The content of each file, which a script of the input replaces.
const CONFIG: [u8; 4096] = [b'1'; 4096];
const CUSTOM: [u8; 1024] = [b'2'; 1024];
const ENVIRONMENT: [u8; 1024] = [b'3'; 1024];
const ENTRY: [u8; 512] = [b'4'; 512];

struct Template {
    seed: Seed,
    config: usize,
    custom: usize,
    environment: usize,
    entry: usize,
}

static TEMPLATE: LazyLock<Template> = LazyLock::new(|| {
    let seed = Seed::new(fat(
        96,
        &[
            ("/boot/grub/grub.cfg", &CONFIG),
            ("/boot/grub/custom.cfg", &CUSTOM),
            ("/boot/grub/grubenv", &ENVIRONMENT),
            ("/loader/entries/e.conf", &ENTRY),
            ("/k", &KERNEL),
            ("/i", &[8; 10]),
        ],
    ));
    Template {
        config: seed.position(&CONFIG),
        custom: seed.position(&CUSTOM),
        environment: seed.position(&ENVIRONMENT),
        entry: seed.position(&ENTRY),
        seed,
    }
});

fn text(pieces: &[Piece<'_>], room: usize) -> Vec<u8> {
    let mut text = Vec::new();
    for piece in pieces {
        let (word, end) = match piece {
            Piece::Word(word) => (word, ""),
            Piece::Blank(word) => (word, " "),
            Piece::Line(word) => (word, "\n"),
            Piece::Text(bytes) => {
                text.extend_from_slice(bytes);
                continue;
            }
        };
        text.extend_from_slice(WORDS[usize::from(*word) % WORDS.len()].as_bytes());
        text.extend_from_slice(end.as_bytes());
    }
    text.resize(room, b'\n');
    text
}

fuzz_target!(|input: Input<'_>| {
    let template = &*TEMPLATE;
    let mut disk = Patched::new(&template.seed, &[]);
    disk.write(template.config, text(&input.config, CONFIG.len()));
    disk.write(template.custom, text(&input.custom, CUSTOM.len()));
    let entry = [&b"linux /k\noptions "[..], &text(&input.entry, ENTRY.len())].concat();
    disk.write(template.entry, entry[..ENTRY.len()].to_vec());
    let mut environment = b"# GRUB Environment Block\n".to_vec();
    for variable in &input.environment {
        environment.extend_from_slice(NAMES[usize::from(variable.name) % NAMES.len()]);
        environment.push(b'=');
        environment.extend_from_slice(variable.value);
        environment.push(b'\n');
    }
    environment.resize(ENVIRONMENT.len(), b'#');
    disk.write(template.environment, environment);
    if let Ok(entry) = search(disk) {
        let files: Vec<&str> = entry.kernel().paths().collect();
        assert_eq!(files.len(), 1);
        if files[0].eq_ignore_ascii_case("/k") {
            assert_eq!(read(entry.kernel()).as_deref(), Some(&KERNEL[..]));
        }
    }
});
