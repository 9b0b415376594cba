//! Bar charts with scatter, as SVG.

use super::stats::Summary;
use super::table::number;
use std::fmt::Write;

/// One quantity of several cases.
#[derive(Debug)]
pub struct Panel {
    /// Title and unit.
    pub title: String,
    /// Each case's name and values.
    pub bars: Vec<(String, Summary)>,
    /// A limit for the first case.
    pub limit: Option<f64>,
}

/// Direction in which the values of a panel are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Smaller values are better.
    Less,
    /// Larger values are better.
    More,
}

const WIDTH: f64 = 760.0;
/// Horizontal range of the bars.
const LEFT: f64 = 170.0;
const RIGHT: f64 = 640.0;
const BAR: f64 = 24.0;
const HEAD: f64 = 34.0;
const TOP: f64 = 44.0;

/// Draws all `panels`, one below the other, under a line with the title.
pub fn draw(heading: &str, better: Better, panels: &[Panel]) -> String {
    let better = match better {
        Better::Less => "Less",
        Better::More => "More",
    };
    let height: f64 = panels
        .iter()
        .map(|panel| HEAD + panel.bars.len() as f64 * BAR + 10.0)
        .sum();
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {h}" width="{WIDTH}" height="{h}" font-family="sans-serif" font-size="13" fill="#1a1a1a">
<rect width="100%" height="100%" fill="#ffffff"/>
"##,
        h = TOP + height + 10.0
    );
    let _ = writeln!(
        svg,
        r##"<text x="16" y="24" font-size="11" fill="#555">{}</text>
<text x="16" y="40" font-size="11" fill="#555">Medians, whiskers from p10 to p90; dashed: the figure to hold. {better} is better.</text>"##,
        escape(heading)
    );
    let mut top = TOP;
    for panel in panels {
        panel.draw(&mut svg, top);
        top += HEAD + panel.bars.len() as f64 * BAR + 10.0;
    }
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    fn draw(&self, svg: &mut String, top: f64) {
        let ends = self.bars.iter().map(|(_, bar)| bar.p90).chain(self.limit);
        let longest = ends.fold(f64::MIN_POSITIVE, f64::max);
        let x = |value: f64| LEFT + (RIGHT - LEFT) * value / longest;
        let _ = writeln!(
            svg,
            r#"<text x="16" y="{:.1}" font-weight="bold">{}</text>"#,
            top + 24.0,
            escape(&self.title)
        );
        for (row, (case, bar)) in self.bars.iter().enumerate() {
            let y = top + HEAD + row as f64 * BAR;
            let middle = y + BAR / 2.0;
            let colour = if row == 0 { "#c2541b" } else { "#9aa5b1" };
            let _ = writeln!(
                svg,
                r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>
<rect x="{LEFT}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{colour}"/>
<path d="M{:.1} {middle:.1}H{:.1}m0 -4v8M{:.1} {:.1}v8" stroke="#1a1a1a" fill="none"/>
<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
                LEFT - 8.0,
                middle + 4.5,
                escape(case),
                y + 3.0,
                x(bar.median) - LEFT,
                BAR - 6.0,
                x(bar.p10),
                x(bar.p90),
                x(bar.p10),
                middle - 4.0,
                WIDTH - 16.0,
                middle + 4.5,
                number(bar.median)
            );
        }
        if let Some(limit) = self.limit {
            let _ = writeln!(
                svg,
                r##"<path d="M{0:.1} {1:.1}v{2:.1}" stroke="#0a7d3c" stroke-width="2" stroke-dasharray="4 3"/>"##,
                x(limit),
                top + HEAD,
                BAR
            );
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_ends_within_the_picture() {
        let of = |median, p10, p90| Summary {
            median,
            p10,
            p90,
            count: 3,
        };
        let panel = Panel {
            title: "a < b".into(),
            bars: vec![
                ("husk".into(), of(50.0, 40.0, 60.0)),
                ("other".into(), of(90.0, 90.0, 100.0)),
            ],
            limit: Some(80.0),
        };
        let svg = draw("here & now", Better::Less, &[panel]);
        assert!(svg.contains("Less is better"));
        assert!(svg.contains("a &lt; b") && svg.contains("here &amp; now"));
        // 50 of 100 is half the width.
        assert!(svg.contains(r#"width="235.0""#), "{svg}");
        assert!(svg.contains("M640.0") || svg.contains("H640.0"), "{svg}");
        assert_eq!(svg.matches("stroke-dasharray").count(), 1);
    }
}
