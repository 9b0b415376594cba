//! Texts of the guest in messages for people.

/// Longest text of the guest in an error, in bytes before escaping.
pub(crate) const MAX_MESSAGE: usize = 512;

/// Cuts `text` after `limit` bytes, at a character's end.
pub(crate) fn cut(text: &str, limit: usize) -> &str {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Makes a guest's text fit for a log or terminal: control and other invisible characters are escaped, and what is
/// longer than 512 bytes ends in `…`.
#[must_use]
pub fn visible(text: &str) -> String {
    let kept = cut(text, MAX_MESSAGE);
    let mut shown = String::with_capacity(kept.len());
    for character in kept.chars() {
        match character {
            '\'' | '"' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    if kept.len() < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_escaped() {
        assert_eq!(visible("it's \"fine\""), "it's \"fine\"");
        assert_eq!(visible("a\x1b[2J\nb\u{202e}c\\"), "a\\u{1b}[2J\\nb\\u{202e}c\\\\");
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let shown = visible(&"é".repeat(MAX_MESSAGE));
        assert_eq!(shown, format!("{}…", "é".repeat(MAX_MESSAGE / 2)));
        assert_eq!(cut("aé", 2), "a");
    }
}
