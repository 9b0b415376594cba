//! grubenv: the block of variables GRUB keeps between boots (GRUB manual, "The GRUB environment block").

/// Variables of a grubenv file, in order; empty if it is not a grubenv file.
pub(crate) fn parse(text: &str) -> Vec<(String, String)> {
    let Some(body) = text.strip_prefix("# GRUB Environment Block\n") else {
        return Vec::new();
    };
    let mut variables = Vec::new();
    let mut chars = body.chars();
    let mut line = String::new();
    while let Some(c) = chars.next() {
        match c {
            // A backslash keeps a newline or a backslash in a value.
            '\\' => line.extend(chars.next()),
            '\n' => push(&mut variables, &mut line),
            c => line.push(c),
        }
    }
    variables
}

fn push(variables: &mut Vec<(String, String)>, line: &mut String) {
    if let Some((name, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
        variables.push((name.to_owned(), value.to_owned()));
    }
    line.clear();
}

#[cfg(test)]
mod tests {
    #[test]
    fn variables_are_read_and_padding_is_not() {
        let text = "# GRUB Environment Block\n# WARNING: Do not edit\nsaved_entry=a=b\nx=one\\\\two\\\nthree\nempty=\n#####";
        let got = super::parse(text);
        let want = [("saved_entry", "a=b"), ("x", "one\\two\nthree"), ("empty", "")];
        assert_eq!(got, want.map(|(n, v)| (n.to_owned(), v.to_owned())));
        assert!(super::parse("saved_entry=1\n").is_empty());
    }
}
