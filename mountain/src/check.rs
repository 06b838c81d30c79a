use serde::Serialize;
#[derive(Serialize)]
pub struct Report;
impl Report {
    pub fn failed(&self) -> bool {
        false
    }
    pub fn print(&self, _: bool) {}
}
pub fn check() -> Report {
    Report
}
