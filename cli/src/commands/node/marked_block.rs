//! Lines in a text that can be told from all others, to be taken away again.

use std::ops::Range;

pub(super) const BEGIN: &str =
    "# Made by `husk node install`; `husk node uninstall` removes all between these lines.";
pub(super) const END: &str = "# End of what `husk node install` made.";

/// The text with lines behind it. NodeCommand has no end of line at its end has none afterwards.
pub(super) fn add(text: &str, lines: &str) -> String {
    if text.is_empty() || text.ends_with('\n') {
        format!("{text}{lines}\n")
    } else {
        format!("{text}\n{lines}")
    }
}

/// The text without lines that [`add`] added.
pub(super) fn cut(text: &str, lines: Range<usize>) -> String {
    let (before, after) = (&text[..lines.start], &text[lines.end..]);
    match text[lines].ends_with('\n') {
        true => format!("{before}{after}"),
        false => before.strip_suffix('\n').unwrap_or(before).to_owned(),
    }
}

/// Where the lines are that install made.
pub(super) fn find(text: &str) -> Result<Option<Range<usize>>, String> {
    let mut begin = None;
    let mut at = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        match line.trim() {
            // Another's end is not the first's.
            BEGIN if begin.is_some() => break,
            BEGIN => begin = Some((number + 1, at)),
            END => {
                if let Some((_, begin)) = begin {
                    return Ok(Some(begin..at + line.len()));
                }
            }
            _ => {}
        }
        at += line.len();
    }
    match begin {
        None => Ok(None),
        Some((number, _)) => Err(format!(
            "what install made begins at line {number} and has no end: put `{END}` behind its last line"
        )),
    }
}

/// The text with empty lines for those that install made, so that all others have their number.
pub(super) fn blank_out(text: &str) -> Result<String, String> {
    let Some(block) = find(text)? else {
        return Ok(text.to_owned());
    };
    let lines = "\n".repeat(text[block.clone()].matches('\n').count());
    Ok(format!("{}{lines}{}", &text[..block.start], &text[block.end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_as_they_came() {
        for text in ["", "a", "a\n", "\n"] {
            let added = add(text, &format!("{BEGIN}\nb\n{END}"));
            let lines = find(&added).unwrap().unwrap();
            assert_eq!(added.ends_with('\n'), text.is_empty() || text.ends_with('\n'));
            assert_eq!(cut(&added, lines), text);
        }
        assert_eq!(find("a\n"), Ok(None));
        assert_eq!(find(&format!("{END}\n")), Ok(None));
    }

    #[test]
    fn marks_may_be_indented_and_others_lines_stay() {
        let text = format!("a\r\n  {BEGIN}\r\nb\r\n  {END}\r\nc\n");
        let lines = find(&text).unwrap().unwrap();
        assert_eq!(cut(&text, lines), "a\r\nc\n");
        assert_eq!(blank_out(&text).unwrap(), "a\r\n\n\n\nc\n");
    }

    #[test]
    fn without_its_end_a_block_is_refused() {
        let why = find(&format!("a\n{BEGIN}\nb\n")).unwrap_err();
        assert!(
            why.starts_with("what install made begins at line 2 and has no end: "),
            "{why}"
        );
    }
}
