//! Feeds entries of the Boot Loader Specification and a `loader.conf` on a FAT filesystem to the search for a kernel.
//! Asserts that the command line has the options of an entry, and that the kernel is a file of the disk.

#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::images::{fat, read, search};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    entries: Vec<Entry<'a>>,
    loader: Vec<(u8, &'a str)>,
    systemd_boot: bool,
    below_boot: bool,
}

#[derive(Arbitrary, Debug)]
struct Entry<'a> {
    name: Name,
    lines: Vec<(u8, &'a str)>,
    raw: &'a [u8],
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Name {
    machine: u8,
    version: [u8; 2],
    counter: Option<[u8; 2]>,
}

const KEYS: [&str; 12] = [
    "linux /k",
    "initrd /i",
    "linux",
    "title",
    "version",
    "machine-id",
    "sort-key",
    "architecture",
    "initrd",
    "options",
    "efi",
    "# ",
];
const LOADER: [&str; 5] = ["default", "preferred", "timeout", "default *-", "default ["];
const KERNEL: [u8; 600] = [7; 600];

impl Name {
    fn text(self) -> String {
        let [major, minor] = self.version;
        let tilde = if self.machine & 8 != 0 { "~rc" } else { "." };
        let counter = self.counter.map_or(String::new(), |[left, done]| match done {
            0 => format!("+{left}"),
            done => format!("+{left}-{done}"),
        });
        format!("m{}-{major}{tilde}{minor}{counter}.conf", self.machine % 3)
    }
}

fn lines(keys: &[&str], lines: &[(u8, &str)]) -> Vec<u8> {
    let mut text = String::new();
    for (key, value) in lines.iter().take(12) {
        let key = keys[usize::from(*key) % keys.len()];
        let value: String = value.chars().take(120).collect();
        text += &format!("{key} {value}\n");
    }
    text.into_bytes()
}

fuzz_target!(|input: Input<'_>| {
    let dir = if input.below_boot {
        "/boot/loader"
    } else {
        "/loader"
    };
    let mut tree: Vec<(String, Vec<u8>)> = vec![
        ("/k".into(), KERNEL.to_vec()),
        ("/i".into(), vec![8; 10]),
        ("/loader/loader.conf".into(), lines(&LOADER, &input.loader)),
    ];
    if input.systemd_boot {
        tree.push(("/EFI/systemd/systemd-bootx64.efi".into(), b"MZ".to_vec()));
    }
    let mut options = Vec::new();
    for entry in input.entries.iter().take(6) {
        let name = format!("{dir}/entries/{}", entry.name.text());
        if tree.iter().any(|(path, _)| *path == name) {
            continue;
        }
        let mut text = lines(&KEYS, &entry.lines);
        text.extend_from_slice(&entry.raw[..entry.raw.len().min(200)]);
        options.push(String::from_utf8_lossy(&text).into_owned());
        tree.push((name, text));
    }
    let tree: Vec<(&str, &[u8])> = tree
        .iter()
        .map(|(path, text)| (path.as_str(), text.as_slice()))
        .collect();
    let disk = fat(80, &tree);
    if let Ok(entry) = search(disk) {
        if entry.kernel().paths().eq(["/k"]) {
            assert_eq!(read(entry.kernel()).as_deref(), Some(&KERNEL[..]));
        }
        let mut words = entry.command_line.split(' ').filter(|word| !word.is_empty());
        assert!(words.all(|word| options.iter().any(|text| text.contains(word))));
    }
});
