//! The words of a kernel command line, as the kernel takes them apart (lib/cmdline.c, kernel/params.c).

use super::vmlinux::KaslrMode;

/// The kernel's own parameters: quotes hold blanks together, and "--" ends them.
fn parameters(command_line: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    command_line
        .split(move |c| {
            quoted ^= c == '"';
            !quoted && matches!(c, ' ' | '\t'..='\r')
        })
        .map(|word| word.strip_prefix('"').unwrap_or(word))
        .take_while(|word| !matches!(*word, "--" | "--\""))
}

/// A directly booted guest that panics and was told nothing else reboots after a second instead of
/// standing still for ever, which nobody would notice.
pub(super) fn with_panic_timeout(command_line: &str) -> String {
    if parameters(command_line).any(|word| word.starts_with("panic=")) {
        return command_line.to_owned();
    }
    match command_line.trim_end() {
        "" => "panic=1".into(),
        rest => format!("panic=1 {rest}"),
    }
}

/// What of the kernel's addresses may be drawn by seed. Words about physical memory keep it where it was
/// linked to be, since only the kernel's own decompressor reads them.
pub(super) fn kaslr(command_line: &str) -> KaslrMode {
    let about_memory = |word: &str| {
        ["mem=", "memmap=", "hugepages=", "efi_fake_mem="]
            .iter()
            .any(|p| word.starts_with(p))
    };
    if parameters(command_line).any(|word| word == "nokaslr") {
        KaslrMode::Off
    } else if parameters(command_line).any(about_memory) {
        KaslrMode::VirtualOnly
    } else {
        KaslrMode::Full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_says_what_is_randomised() {
        assert_eq!(kaslr("console=ttyS0 quiet"), KaslrMode::Full);
        assert_eq!(kaslr("quiet nokaslr"), KaslrMode::Off);
        assert_eq!(kaslr("quiet -- nokaslr"), KaslrMode::Full);
        assert_eq!(kaslr("mem=512M nokaslrx"), KaslrMode::VirtualOnly);
    }

    #[test]
    fn a_panic_timeout_is_added_where_there_is_none() {
        for (given, expected) in [
            ("", "panic=1"),
            ("  ", "panic=1"),
            ("console=ttyS0 quiet", "panic=1 console=ttyS0 quiet"),
            ("console=ttyS0\n", "panic=1 console=ttyS0"),
            // Something else that begins or ends alike.
            ("panic_on_oops=1 oops=panic", "panic=1 panic_on_oops=1 oops=panic"),
            ("xpanic=3", "panic=1 xpanic=3"),
            // What is init's is not the kernel's.
            ("quiet -- panic=3", "panic=1 quiet -- panic=3"),
            ("quiet \"--\" panic=3", "panic=1 quiet \"--\" panic=3"),
            // In a quoted value.
            ("dyndbg=\"file a panic=3\"", "panic=1 dyndbg=\"file a panic=3\""),
        ] {
            assert_eq!(with_panic_timeout(given), expected, "{given:?}");
        }
    }

    #[test]
    fn a_panic_timeout_that_is_given_stays() {
        for given in [
            "panic=0",
            "quiet panic=-1 ro",
            "panic=",
            "quiet\tpanic=5",
            "\"panic=5\" quiet",
            "foo=\"a -- b\" panic=5",
            "--x panic=5",
            "panic=5 -- single",
        ] {
            assert_eq!(with_panic_timeout(given), given);
        }
    }
}
