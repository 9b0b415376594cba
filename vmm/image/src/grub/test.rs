//! GRUB's `test` and `[`.

use std::cmp::Ordering;

/// File tests on the disk.
pub(crate) trait FileTests {
    /// Size of a regular file in bytes, if there is one.
    fn size(&self, path: &str) -> Option<u64>;
    /// True if the directory exists.
    fn is_dir(&self, path: &str) -> bool;
}

/// Evaluates the arguments of `test` (without a closing bracket). Malformed expressions are false.
pub(crate) fn test(args: &[String], files: &dyn FileTests) -> bool {
    let mut at = 0;
    disjunction(args, &mut at, files, 0)
}

/// Maximum nesting of parentheses.
const MAX_NESTING: usize = 16;

fn disjunction(args: &[String], at: &mut usize, files: &dyn FileTests, depth: usize) -> bool {
    let (mut any, mut all) = (false, primary(args, at, files, depth));
    while let Some(word) = args.get(*at).map(String::as_str) {
        match word {
            ")" => break,
            "-o" => {
                *at += 1;
                any |= all;
                all = primary(args, at, files, depth);
            }
            "-a" => {
                *at += 1;
                all &= primary(args, at, files, depth);
            }
            // Two terms without a word between them are joined by "and".
            _ => all &= primary(args, at, files, depth),
        }
    }
    any || all
}

fn primary(args: &[String], at: &mut usize, files: &dyn FileTests, depth: usize) -> bool {
    let mut negated = false;
    while args.get(*at).is_some_and(|w| w == "!") {
        negated = !negated;
        *at += 1;
    }
    let word = |i: usize| args.get(i).map(String::as_str);
    let (first, second, third) = (word(*at), word(*at + 1), word(*at + 2));
    let (value, used) = match (first, second, third) {
        (None, ..) => (false, 0),
        (Some(a), Some(op), Some(b)) if compare(a, op, b).is_some() => (compare(a, op, b) == Some(true), 3),
        (Some("("), ..) if depth < MAX_NESTING => {
            *at += 1;
            let value = disjunction(args, at, files, depth + 1);
            (value, 1)
        }
        (Some("-z"), Some(a), _) => (a.is_empty(), 2),
        (Some("-n"), Some(a), _) => (!a.is_empty(), 2),
        (Some("-f"), Some(a), _) => (files.size(a).is_some(), 2),
        (Some("-s"), Some(a), _) => (files.size(a).is_some_and(|n| n > 0), 2),
        (Some("-d"), Some(a), _) => (files.is_dir(a), 2),
        (Some("-e"), Some(a), _) => (files.size(a).is_some() || files.is_dir(a), 2),
        (Some(a), ..) => (!a.is_empty(), 1),
    };
    *at += used;
    value != negated
}

fn compare(a: &str, op: &str, b: &str) -> Option<bool> {
    let number = |s: &str| s.trim().parse::<i64>().unwrap_or(0);
    let numbers = |want: fn(Ordering) -> bool| Some(want(number(a).cmp(&number(b))));
    match op {
        "=" | "==" => Some(a == b),
        "!=" => Some(a != b),
        "<" => Some(a < b),
        "<=" => Some(a <= b),
        ">" => Some(a > b),
        ">=" => Some(a >= b),
        "-eq" => numbers(Ordering::is_eq),
        "-ne" => numbers(Ordering::is_ne),
        "-lt" => numbers(Ordering::is_lt),
        "-le" => numbers(Ordering::is_le),
        "-gt" => numbers(Ordering::is_gt),
        "-ge" => numbers(Ordering::is_ge),
        // Newer and older, with or without an offset: no modification times are read.
        _ if op.starts_with("-nt") || op.starts_with("-ot") || op.starts_with("-pgt") => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct OneFile;

    impl FileTests for OneFile {
        fn size(&self, path: &str) -> Option<u64> {
            (path == "/f").then_some(3)
        }

        fn is_dir(&self, path: &str) -> bool {
            path == "/d"
        }
    }

    #[test]
    fn terms_join_as_in_grub() {
        for (text, want) in [
            ("", false),
            ("a", true),
            ("x = x", true),
            ("x != x", false),
            ("-z x", false),
            ("-n x", true),
            ("! -n x", false),
            ("-f /f", true),
            ("-s /f -a -d /d", true),
            ("-e /g -o -e /d", true),
            ("( a = b -o c = c ) -a ! d = e", true),
            ("a = b -o c = d", false),
            ("9 -lt 10", true),
            ("9 < 10", false),
            ("-z", true),
            ("! ! x", true),
        ] {
            let args: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            assert_eq!(test(&args, &OneFile), want, "{text}");
        }
        assert!(test(&[String::new(), "=".into(), String::new()], &OneFile));
        assert!(!test(&["-n".into(), String::new()], &OneFile));
        let deep = vec!["(".to_owned(); 100_000];
        test(&deep, &OneFile);
    }
}
