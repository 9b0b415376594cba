//! Kubernetes resource quantities: `1024M`, `1Gi`, `0.5`, `12e6`, `100m`.
//!
//! Semantics follow `k8s.io/apimachinery/pkg/api/resource`: a value finer than one nano is rounded up, away from
//! zero; one beyond 2⁶³−1 is capped; the canonical form keeps the family of suffixes the text used.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Nanos in one.
const NANO: i128 = 1_000_000_000;
/// The largest magnitude, in nanos.
const CAP: i128 = (i64::MAX as i128) * NANO;
/// Maximum length of the text in bytes.
const LONGEST: usize = 256;

/// Error of parsing a quantity, with Kubernetes' own text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// It is not a number followed by a suffix.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    /// The number is malformed or too long.
    #[error("unable to parse numeric part of quantity")]
    Numeric,
    /// The suffix is not one of the known ones.
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// Family of suffixes used for printing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// `n u m k M G T P E`
    Decimal,
    /// `e3`, `e6` …
    Exponent,
    /// `Ki Mi Gi Ti Pi Ei`
    Binary,
}

/// A quantity with a resolution of 10⁻⁹. Quantities are compared by value, not by notation.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    nanos: i128,
    family: Family,
}

impl Quantity {
    /// A quantity without a suffix.
    pub fn from_value(value: i64) -> Self {
        Self {
            nanos: i128::from(value) * NANO,
            family: Family::Decimal,
        }
    }

    /// The value, rounded up (away from zero) to a whole number.
    pub fn value(self) -> i64 {
        let whole = divide_up(self.nanos, NANO);
        i64::try_from(whole).unwrap_or(if whole < 0 { i64::MIN } else { i64::MAX })
    }

    /// The value as an unsigned number, such as a size in bytes; `None` if it is negative.
    pub fn bytes(self) -> Option<u64> {
        u64::try_from(self.value()).ok()
    }

    /// True if the value is a whole number.
    pub fn is_whole(self) -> bool {
        self.nanos % NANO == 0
    }

    /// True if the value is below zero.
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        if text.len() > LONGEST {
            return Err(QuantityError::Numeric);
        }
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, text.get(1..).unwrap_or_default()),
            Some(b'+') => (false, text.get(1..).unwrap_or_default()),
            _ => (false, text),
        };
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || !shaped_like_a_suffix(suffix) {
            return Err(QuantityError::Format);
        }
        if fraction.contains('.') {
            return Err(QuantityError::Numeric);
        }
        let (family, power) = read_suffix(suffix)?;

        let digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).map(|b| b - b'0').collect();
        let (digits, shift) = match power {
            Power::Ten(power) => (digits, power),
            Power::Two(power) => (times_1024(digits, power), 0),
        };
        // The decimal point, counted from the right end of `digits`, once the value is in nanos.
        let point = fraction.len() as i64 - shift - 9;
        let nanos = round_up(&digits, point);
        let below_one = nanos > 0 && nanos < NANO;
        Ok(Self {
            nanos: if negative { -nanos } else { nanos },
            family: if family == Family::Binary && below_one {
                Family::Decimal
            } else {
                family
            },
        })
    }
}

/// Factor of a suffix.
enum Power {
    /// 10ⁿ
    Ten(i64),
    /// 1024ⁿ
    Two(u32),
}

fn shaped_like_a_suffix(suffix: &str) -> bool {
    let rest = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
    rest.strip_prefix(['+', '-'])
        .unwrap_or(rest)
        .bytes()
        .all(|b| b.is_ascii_digit())
}

fn read_suffix(suffix: &str) -> Result<(Family, Power), QuantityError> {
    let decimal = |power| Ok((Family::Decimal, Power::Ten(power)));
    let binary = |power| Ok((Family::Binary, Power::Two(power)));
    match suffix {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        _ => {
            let power = suffix.strip_prefix(['e', 'E']).ok_or(QuantityError::Suffix)?;
            let power = power.parse::<i32>().map_err(|_| QuantityError::Suffix)?;
            Ok((Family::Exponent, Power::Ten(i64::from(power))))
        }
    }
}

/// Multiplies a number, most significant digit first, by 1024ⁿ.
fn times_1024(mut digits: Vec<u8>, power: u32) -> Vec<u8> {
    for _ in 0..power {
        let mut carry = 0u32;
        for digit in digits.iter_mut().rev() {
            let product = u32::from(*digit) * 1024 + carry;
            *digit = (product % 10) as u8;
            carry = product / 10;
        }
        while carry > 0 {
            digits.insert(0, (carry % 10) as u8);
            carry /= 10;
        }
    }
    digits
}

/// The number whose decimal point stands `point` digits from the right (beyond it, if negative), rounded up and capped.
fn round_up(digits: &[u8], point: i64) -> i128 {
    let first = digits.iter().position(|d| *d != 0);
    let Some(first) = first else { return 0 };
    let digits = &digits[first..];
    let whole = digits.len() as i64 - point;
    if whole > 28 {
        return CAP;
    }
    if whole <= 0 {
        return 1;
    }
    let whole = whole as usize;
    let mut value = 0i128;
    for place in 0..whole {
        value = value * 10 + i128::from(digits.get(place).copied().unwrap_or(0));
    }
    let more = digits
        .get(whole..)
        .is_some_and(|rest| rest.iter().any(|d| *d != 0));
    (value + i128::from(more)).min(CAP)
}

fn divide_up(value: i128, by: i128) -> i128 {
    let quotient = value / by;
    if value % by == 0 {
        quotient
    } else {
        quotient + value.signum()
    }
}

/// The canonical form.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let family = match self.family {
            Family::Binary if self.nanos.abs() < 1024 * NANO => Family::Decimal,
            family => family,
        };
        if family == Family::Binary {
            let mut value = divide_up(self.nanos, NANO);
            let mut suffixes = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].into_iter();
            let mut suffix = suffixes.next().unwrap_or_default();
            while value % 1024 == 0 {
                let Some(next) = suffixes.next() else { break };
                value /= 1024;
                suffix = next;
            }
            return write!(f, "{value}{suffix}");
        }
        let (mut value, mut exponent) = (self.nanos, -9);
        while value % 1000 == 0 {
            value /= 1000;
            exponent += 3;
        }
        match (family, exponent) {
            (_, 0) => write!(f, "{value}"),
            (Family::Exponent, _) => write!(f, "{value}e{exponent}"),
            (_, -9) => write!(f, "{value}n"),
            (_, -6) => write!(f, "{value}u"),
            (_, -3) => write!(f, "{value}m"),
            (_, 3) => write!(f, "{value}k"),
            (_, 6) => write!(f, "{value}M"),
            (_, 9) => write!(f, "{value}G"),
            (_, 12) => write!(f, "{value}T"),
            (_, 15) => write!(f, "{value}P"),
            _ => write!(f, "{value}E"),
        }
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Accepts a string or a bare number.
impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text) => text.trim().parse(),
            serde_json::Value::Number(number) => number.to_string().parse(),
            _ => Err(QuantityError::Format),
        }
        .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canonical(text: &str) -> String {
        text.parse::<Quantity>()
            .map_or_else(|e| format!("error: {e}"), |q| q.to_string())
    }

    #[test]
    fn canonical_forms_are_those_of_kubernetes() {
        for (text, want) in [
            ("0", "0"),
            ("-0", "0"),
            ("1024M", "1024M"),
            ("4G", "4G"),
            ("4000M", "4G"),
            ("1Gi", "1Gi"),
            ("1024Mi", "1Gi"),
            ("1536Mi", "1536Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("1023", "1023"),
            ("100m", "100m"),
            ("0.1", "100m"),
            ("1500m", "1500m"),
            ("2000m", "2"),
            (".5", "500m"),
            ("5.", "5"),
            ("+7k", "7k"),
            ("-3.01", "-3010m"),
            ("1e3", "1e3"),
            ("12e2", "1200"),
            ("1E6", "1e6"),
            ("1E", "1E"),
            ("1.2e-3", "1200e-6"),
            ("0.000000001", "1n"),
            ("0.0000000001", "1n"),
            ("-0.0000000001", "-1n"),
            ("1n", "1n"),
            ("1500u", "1500u"),
            ("0.0001Mi", "104857600u"),
            ("9223372036854775807", "9223372036854775807"),
            ("9223372036854775808", "9223372036854775807"),
            ("8Ei", "9223372036854775807"),
            ("1e2000000", "9223372036854775807"),
            ("1e-2000000", "1e-9"),
            ("0e2000000", "0"),
            ("0001", "1"),
        ] {
            assert_eq!(canonical(text), want, "{text}");
        }
    }

    #[test]
    fn malformed_quantities_are_refused_with_kubernetes_texts() {
        for text in [
            "", " 1", "1 ", "1.1.M", "aoeu", "Mi", ".", "1+1.0M", "1Mi5Gi", "٣", "--1", "1é",
        ] {
            assert!(text.parse::<Quantity>().is_err(), "{text:?}");
        }
        assert_eq!("0.1mi".parse::<Quantity>(), Err(QuantityError::Suffix));
        assert_eq!("0.1am".parse::<Quantity>(), Err(QuantityError::Format));
        assert_eq!("1i".parse::<Quantity>(), Err(QuantityError::Suffix));
        assert_eq!("-3.01e-".parse::<Quantity>(), Err(QuantityError::Suffix));
        assert_eq!("1KiB".parse::<Quantity>(), Err(QuantityError::Format));
        assert_eq!("9".repeat(300).parse::<Quantity>(), Err(QuantityError::Numeric));
    }

    #[test]
    fn values_round_away_from_zero() {
        let value = |text: &str| text.parse::<Quantity>().unwrap().value();
        assert_eq!(value("1.1"), 2);
        assert_eq!(value("-1.1"), -2);
        assert_eq!(value("100m"), 1);
        assert_eq!(value("1Gi"), 1 << 30);
        assert_eq!("-1".parse::<Quantity>().unwrap().bytes(), None);
    }

    #[test]
    fn bare_numbers_are_quantities() {
        let read = |json: &str| serde_json::from_str::<Quantity>(json).map(|q| q.to_string()).ok();
        assert_eq!(read("2").as_deref(), Some("2"));
        assert_eq!(read("0.5").as_deref(), Some("500m"));
        assert_eq!(read("\" 1Gi \"").as_deref(), Some("1Gi"));
        assert_eq!(read("true"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn a_canonical_form_reads_back_as_itself(
            number in "[+-]?[0-9]{0,12}\\.?[0-9]{0,12}",
            suffix in prop::sample::select(vec![
                "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "e3", "E-7", "e+19",
            ]),
        ) {
            let text = format!("{number}{suffix}");
            if let Ok(quantity) = text.parse::<Quantity>() {
                let printed = quantity.to_string();
                let again: Quantity = printed.parse().unwrap();
                // A binary quantity prints whole bytes, without a suffix where 1024 does not divide them: that is then
                // read as a decimal one. Every other form is exact.
                if quantity.family != Family::Binary || printed.ends_with('i') {
                    prop_assert_eq!(&again.to_string(), &printed);
                }
                if quantity.family != Family::Binary || quantity.is_whole() {
                    prop_assert_eq!(again, quantity, "{}", text);
                }
            }
        }

        #[test]
        fn whole_numbers_keep_their_value(value in any::<i64>()) {
            prop_assume!(value != i64::MIN);
            let quantity: Quantity = value.to_string().parse().unwrap();
            prop_assert_eq!(quantity.value(), value);
            prop_assert_eq!(quantity, Quantity::from_value(value));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = text.parse::<Quantity>().map(|q| q.to_string());
        }
    }
}
