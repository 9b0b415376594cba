//! Shell patterns as `loader.conf` uses them: `*`, `?` and `[…]`.

/// Maximum length of a pattern in bytes: matching takes time proportional to the product of both lengths.
const MAX_PATTERN: usize = 1024;

/// True if the whole `text` matches `pattern`; a pattern of more than 1,024 bytes matches nothing.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    if pattern.len() > MAX_PATTERN {
        return false;
    }
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Position of the last `*`, for backtracking: on a mismatch it takes one more character.
    let mut star = None;
    while t < text.len() {
        let step = match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
                continue;
            }
            Some('?') => Some(p + 1),
            Some('[') => class(&pattern, p, text[t]),
            Some(c) if *c == text[t] => Some(p + 1),
            _ => None,
        };
        match (step, star) {
            (Some(next), _) => (p, t) = (next, t + 1),
            (None, Some((at, taken))) => {
                star = Some((at, taken + 1));
                (p, t) = (at + 1, taken + 1);
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Position after the class at `open`, if `c` is in it.
fn class(pattern: &[char], open: usize, c: char) -> Option<usize> {
    let mut at = open + 1;
    let negated = matches!(pattern.get(at), Some('!' | '^'));
    at += usize::from(negated);
    let (first, mut found) = (at, false);
    loop {
        let low = *pattern.get(at)?;
        if low == ']' && at > first {
            return (found != negated).then_some(at + 1);
        }
        match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some('-'), Some(high)) if *high != ']' => {
                found |= (low..=*high).contains(&c);
                at += 3;
            }
            _ => {
                found |= low == c;
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_in_the_shell() {
        for (pattern, text, want) in [
            ("debian-*", "debian-6.1", true),
            ("*-6.?", "debian-6.1", true),
            ("*-6.?", "debian-6.12", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]", "]", true),
            ("[a", "a", false),
            ("", "", true),
            ("*", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, text), want, "{pattern} {text}");
        }
        assert!(!matches(&"*a".repeat(200), &"a".repeat(150)));
    }
}
