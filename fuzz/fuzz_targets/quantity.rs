//! Kubernetes quantities. Asserts that the canonical form of a text is a form of the same quantity, and that the order of
//! two quantities is that of their values.
#![no_main]

use arbitrary::Arbitrary;
use husk_vmi::{Quantity, QuantityError};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Text {
    Any(String),
    Number {
        sign: u8,
        whole: u64,
        zeros: u8,
        fraction: Option<u64>,
        suffix: u8,
        exponent: i16,
    },
}

const SUFFIXES: [&str; 20] = [
    "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "e", "E", "Zi", "K",
];

impl Text {
    fn text(&self) -> String {
        match self {
            Text::Any(text) => text.clone(),
            Text::Number {
                sign,
                whole,
                zeros,
                fraction,
                suffix,
                exponent,
            } => {
                let sign = ["", "-", "+"][usize::from(*sign) % 3];
                let zeros = "0".repeat((*zeros % 40).into());
                let fraction = fraction.map_or(String::new(), |fraction| format!(".{zeros}{fraction}"));
                let suffix = SUFFIXES[usize::from(*suffix) % SUFFIXES.len()];
                let exponent = match suffix {
                    "e" => exponent.to_string(),
                    "E" if *exponent != 0 => exponent.to_string(),
                    _ => String::new(),
                };
                format!("{sign}{whole}{fraction}{suffix}{exponent}")
            }
        }
    }
}

fn parsed(text: &Text) -> Option<Quantity> {
    let text = text.text();
    let quantity: Result<Quantity, QuantityError> = text.parse();
    let quantity = quantity.ok()?;
    let canonical = quantity.to_string();
    let again: Quantity = canonical
        .parse()
        .unwrap_or_else(|error| panic!("{text} is {canonical}: {error}"));
    // A binary suffix has no fraction: the canonical form is rounded up.
    if quantity.is_whole() || !text.contains('i') {
        assert_eq!(again, quantity, "{text} is {canonical}");
    }
    // Without a suffix it is decimal when it is read, so that it may get a shorter form once.
    let shortest = again.to_string();
    let decimal: Quantity = shortest.parse().expect("a quantity");
    assert_eq!((decimal, decimal.to_string()), (again, shortest));
    assert_eq!(again.value(), quantity.value(), "{text} is {canonical}");
    assert_eq!(quantity.is_negative(), quantity.bytes().is_none());
    let json = serde_json::to_value(quantity).expect("JSON");
    assert_eq!(
        serde_json::from_value::<Quantity>(json).expect("a quantity"),
        again
    );
    Some(quantity)
}

fuzz_target!(|texts: (Text, Text)| {
    if let (Some(one), Some(two)) = (parsed(&texts.0), parsed(&texts.1)) {
        assert_eq!(one.cmp(&two), two.cmp(&one).reverse());
        if one <= two {
            assert!(one.value() <= two.value());
        }
    }
});
