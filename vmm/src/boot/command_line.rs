//! Parses a kernel command line as the kernel does (lib/cmdline.c, kernel/params.c).

use super::vmlinux::KaslrMode;

/// The kernel's own parameters: quoted blanks do not separate words, and "--" ends the list.
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

/// Adds `panic=1` if the command line sets no panic timeout: the guest then reboots one second after a panic, instead
/// of hanging unnoticed.
pub(super) fn with_panic_timeout(command_line: &str) -> String {
    if parameters(command_line).any(|word| word.starts_with("panic=")) {
        return command_line.to_owned();
    }
    match command_line.trim_end() {
        "" => "panic=1".into(),
        rest => format!("panic=1 {rest}"),
    }
}

/// The base addresses that may be randomised. Parameters about physical memory keep the physical base that the kernel
/// was linked for, because only the kernel's own decompressor evaluates them.
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
    fn the_command_line_selects_the_randomised_bases() {
        assert_eq!(kaslr("console=ttyS0 quiet"), KaslrMode::Full);
        assert_eq!(kaslr("quiet nokaslr"), KaslrMode::Off);
        assert_eq!(kaslr("quiet -- nokaslr"), KaslrMode::Full);
        assert_eq!(kaslr("mem=512M nokaslrx"), KaslrMode::VirtualOnly);
    }

    #[test]
    fn a_missing_panic_timeout_is_added() {
        for (given, expected) in [
            ("", "panic=1"),
            ("  ", "panic=1"),
            ("console=ttyS0 quiet", "panic=1 console=ttyS0 quiet"),
            ("console=ttyS0\n", "panic=1 console=ttyS0"),
            // Other parameters with a similar beginning or end.
            ("panic_on_oops=1 oops=panic", "panic=1 panic_on_oops=1 oops=panic"),
            ("xpanic=3", "panic=1 xpanic=3"),
            // Arguments of init, not of the kernel.
            ("quiet -- panic=3", "panic=1 quiet -- panic=3"),
            ("quiet \"--\" panic=3", "panic=1 quiet \"--\" panic=3"),
            // In a quoted value.
            ("dyndbg=\"file a panic=3\"", "panic=1 dyndbg=\"file a panic=3\""),
        ] {
            assert_eq!(with_panic_timeout(given), expected, "{given:?}");
        }
    }

    #[test]
    fn a_given_panic_timeout_is_kept() {
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
